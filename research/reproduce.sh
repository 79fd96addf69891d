#!/usr/bin/env bash
# From nothing to the shipped weights, the results files, the tables and the plots, in this order.
#
#   bash research/reproduce.sh --list             every step with its cost and its commands; runs nothing
#   bash research/reproduce.sh                    all of it
#   bash research/reproduce.sh weights            one part: weights, control, scores, looks, speed, pages
#   bash research/reproduce.sh pair-1 pair-2      single steps
#   bash research/reproduce.sh --list scores      both
#
# Needs: pip install -e '.[dev]', one H200 (40 GB of its memory are used), and folders of
#   COCO    train2017 of cocodataset.org, 118,287 photos        PETS  Oxford-IIIT Pet      CAMVID  CamVid
#   SCAU    SCAU RGB-D                                          NYU   NYUv2, 1,449 labelled pairs
# Cost in all: 2.5 hours of the H200 for the shipped weights, 45 minutes for the control, half an hour for
# the scores, and 7.5 hours of one CPU core for the scores. Costs are those of the runs that are kept;
# "not timed" where no one looked. Another GPU or another version of torch gives other bits.
#
# A run of training that is there is not repeated, one that was stopped is resumed.
# Left out are runs that nothing shipped goes back to: sections 2 to 5, 9, 12, 13, 15 and 16 of the diary.
# Tables of theirs are made from the files that are kept.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

: "${COCO:=COCO/train2017}" "${PETS:=oxford-pets}" "${CAMVID:=camvid}" "${SCAU:=scau-rgbd}" "${NYU:=nyu}"
RECORDS=research/results/probes
LATER=research/configs

doing=run
wanted=()
for word in "$@"; do
    case $word in
        --list | --dry-run) doing=list ;;
        -h | --help) sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
        -*) echo "unknown option $word; --list shows every step." >&2; exit 2 ;;
        *) wanted+=("$word") ;;
    esac
done

asked() { # whether any of these names was asked for; all are, if none is
    local name
    [[ ${#wanted[@]} -gt 0 ]] || return 0
    for name in "$@"; do
        if [[ " ${wanted[*]} " == *" $name "* ]]; then return 0; fi
    done
    return 1
}

part() { # NAME, what it is for
    part=$1
    known+="$1 "
    if [[ $mode == list ]] && asked "$1"; then printf '\n%s: %s\n' "$1" "$2"; fi
}

step() { # NAME, COST: begins a step; the commands after it belong to it
    known+="$1 "
    taking=false
    if [[ $mode != names ]] && asked "$1" "$part"; then
        taking=true
        printf '\n  %s (%s)\n' "$1" "$2"
    fi
}

do_() { # one command of the step
    $taking || return 0
    printf '   '
    printf ' %q' "$@"
    printf '\n'
    if [[ $mode == run ]]; then "$@"; fi
}

train() { # RUN, CONFIG, further options: one run of distillation
    local out=runs/$1 resume=()
    if [[ $mode == run && -d $out/final ]]; then
        if $taking; then echo "    $out is there"; fi
        return 0
    fi
    if [[ $mode == run && -d $out ]]; then resume=(--resume); fi
    do_ veca distill --config "$2" --data "$COCO" --out "$out" "${@:3}" "${resume[@]}"
}

probes() { # RECORD, further options: the five probes of the tables, Pets with all of its photos
    local all=(python -m benchmarks probes --pets "$PETS" --camvid "$CAMVID" --scau "$SCAU" --no-time
        --out "$RECORDS/$1" "${@:2}")
    do_ "${all[@]}" --only pets-knn --set knn.subset.train=0 --set knn.subset.test=0
    do_ "${all[@]}" --only pets-linear --set linear.subset.train=0 --set linear.subset.test=0
    do_ "${all[@]}" --only pets-trimaps camvid scau-depth
}

depth() { # RECORD, further options: depth on SCAU alone
    do_ veca probe depth --data "$SCAU" --dataset scau-rgbd --protocol quick --cores 8,16,32,64 --no-time \
        --overwrite --out "$RECORDS/$1" "${@:2}"
}

rooms() { # RECORD, further options: depth on NYUv2, all photos
    do_ veca probe depth --data "$NYU" --dataset nyuv2 --protocol quick --cores 8,16,32,64 --no-time \
        --set depth.subset.train=0 --set depth.subset.test=0 --weights veca_small_patch16 \
        --weights veca_tiny_patch16 --overwrite --out "$RECORDS/$1" "${@:2}"
}

steps() {
# ------------------------------------------------------------------------------------------- weights
part weights "the shipped small and tiny, by the runs they come from (diary, sections 7 to 22)"

# Tiny begins here, beside a small that is not shipped any more.
step coco-1 "17 minutes on an H200"
train coco-1 $LATER/coco-stage1.toml
step small-1 "11 minutes on an H200"
train small-1 $LATER/coco-stage1-longer.toml
step tiny-1 "8 minutes on an H200"
train tiny-1 $LATER/coco-stage1-longer.toml \
    --set student.init=runs/coco-1/siblings/tiny --set schedule.steps=3700
step small-2 "6 minutes on an H200"
train small-2 $LATER/coco-stage2-longer.toml
step tiny-2 "minutes on an H200, not timed"
train tiny-2 $LATER/coco-stage2-longer.toml \
    --set student.init=runs/tiny-1/final --set schedule.steps=1000 --set schedule.batch=384 \
    --set 'schedule.batch_by_size={256=256, 384=128, 512=64}' \
    --set 'schedule.phases=[{draw={192=0.5, 256=0.35, 384=0.1, 512=0.05}}]'
step at192 "17 minutes on an H200"
train at192 $LATER/coco-192.toml
step on192 "19 minutes on an H200"
train on192 $LATER/coco-192-on.toml
step on192-sizes "4 minutes on an H200"
train on192-sizes $LATER/coco-192-on-sizes.toml
# Small begins here, beside the dense ViT.
step pair-1 "18 minutes on an H200"
train pair-1 coco-pair-stage1
step pair-2 "4 minutes on an H200"
train pair-2 coco-pair-stage2
# Both go on together.
step again-1 "11 minutes on an H200"
train again-1 $LATER/coco-again-stage1.toml
step again-2 "4 minutes on an H200"
train again-2 $LATER/coco-again-stage2.toml
step again192 "20 minutes on an H200"
train again192 $LATER/coco-192-again.toml
step again192-sizes "4 minutes on an H200"
train again192-sizes $LATER/coco-192-again-sizes.toml
step publish "seconds; --results FILE adds what they reach to the card"
do_ veca publish runs/again192-sizes/final --out runs/shipped/veca_small_patch16 --licence Apache-2.0
do_ veca publish runs/again192-sizes/siblings/tiny --out runs/shipped/veca_tiny_patch16 --licence Apache-2.0

# ------------------------------------------------------------------------------------------- control
part control "the dense ViT on the way of small (sections 8, 19 and 23), and cosines of all runs"

step coco-2 "6 minutes on an H200"
train coco-2 $LATER/coco-stage2.toml
step dense-1 "9 minutes on an H200"
train dense-1 $LATER/coco-stage1-longer.toml \
    --set student.dense=true --set student.init=runs/coco-2/siblings/dense --set student.graphs=true
step dense-2 "4 minutes on an H200"
train dense-2 $LATER/coco-stage2-longer.toml \
    --set student.dense=true --set student.init=runs/dense-1/final --set student.graphs=true
dense=(--set 'siblings={}' --set student.dense=true --set student.preset=small)
fast=(--set student.compile=true --set student.graphs=true)
step dense-again-1 "7 minutes on an H200"
train dense-again-1 $LATER/coco-again-stage1.toml "${dense[@]}" --set student.init=runs/pair-2/siblings/dense
step dense-again-2 "minutes on an H200, not timed"
train dense-again-2 $LATER/coco-again-stage2.toml "${dense[@]}" "${fast[@]}" \
    --set student.init=runs/dense-again-1/final
step dense192 "15 minutes on an H200"
train dense192 $LATER/coco-192-again.toml "${dense[@]}" --set student.init=runs/dense-again-2/final
step dense192-sizes "minutes on an H200, not timed"
train dense192-sizes $LATER/coco-192-again-sizes.toml "${dense[@]}" "${fast[@]}" \
    --set student.init=runs/dense192/final
step training "seconds; benchmarks/results/training.csv, in which rows of other runs are kept"
do_ python -m research.training coco-1=runs/coco-1 coco-2=runs/coco-2 small-1=runs/small-1 \
    tiny-1=runs/tiny-1 small-2=runs/small-2 tiny-2=runs/tiny-2 at192=runs/at192 on192=runs/on192 \
    on192-sizes=runs/on192-sizes dense-1=runs/dense-1 dense-2=runs/dense-2 pair-1=runs/pair-1 \
    pair-2=runs/pair-2 again-1=runs/again-1 again-2=runs/again-2 again192=runs/again192 \
    again192-sizes=runs/again192-sizes dense-again-1=runs/dense-again-1 \
    dense-again-2=runs/dense-again-2 dense192=runs/dense192 dense192-sizes=runs/dense192-sizes

# -------------------------------------------------------------------------------------------- scores
part scores "probes; shipped weights are found by name, those of runs in runs/"

step shipped "5 minutes on an H200 and 25 on one CPU core (trimaps), for each of the two; logreg a minute"
probes shipped/small --weights veca_small_patch16=veca_small_patch16 --verify
probes shipped/tiny --weights veca_tiny_patch16=veca_tiny_patch16 --verify
do_ veca probe logreg --data "$PETS" --dataset oxford-pets --teacher efficientnet-lite2 --protocol quick \
    --verify --overwrite --out $RECORDS/shipped/pets-logreg
step intervals "91 minutes on one CPU core, 25 more for NYUv2"
probes intervals --weights veca_small_patch16=veca_small_patch16 \
    --weights veca_tiny_patch16=veca_tiny_patch16 --cores 8,16,32,64 --device cpu
rooms intervals/nyuv2-depth --teacher efficientnet-lite2 --baseline blind
step seeds "2 minutes on an H200, 18 on one CPU core for NYUv2"
for seed in 1 2; do
    depth seeds/scau-depth-$seed --weights veca_small_patch16 --weights veca_tiny_patch16 \
        --teacher efficientnet-lite2 --set seed=$seed --verify
done
rooms seeds/nyuv2-depth-1 --set seed=1
step width "15 minutes on one CPU core"
for width in projected native; do
    for set in pets-trimaps camvid; do
        data=$PETS
        if [[ $set == camvid ]]; then data=$CAMVID; fi
        do_ veca probe segmentation --data "$data" --dataset $set --weights tiny --cores 8,64 \
            --width $width --no-time --threads 1 --workers 1 --overwrite --out research/results/width/$width/$set
    done
done
step blind "5 minutes on one CPU core"
probes blind --teacher= --baseline blind
step few "20 minutes on one CPU core"
do_ veca probe knn --data "$PETS" --dataset oxford-pets --weights veca_small_patch16 \
    --weights veca_tiny_patch16 --teacher efficientnet-lite2 --cores 1,2,4,6,8,64 --protocol quick \
    --set knn.subset.train=20 --set knn.subset.test=20 --no-time --overwrite --out $RECORDS/few/pets-few
step keep "CamVid and SCAU 5 minutes on an H200, Pets 1.5 hours on one CPU core; merged patches at 512 px"
for name in tiny small; do
    first=0.4 pets_a_class=20 trimaps=200
    if [[ $name == small ]]; then first=0.45 pets_a_class=12 trimaps=150; fi
    merged=(--weights veca_${name}_patch16 --cores 8,64 --size 512 --teacher= --no-time --out $RECORDS/keep/$name)
    do_ python -m benchmarks probes --camvid "$CAMVID" --scau "$SCAU" "${merged[@]}" --keep 0.25,0.4,0.45,0.5,0.6,1
    pets=(python -m benchmarks probes --pets "$PETS" "${merged[@]}" --keep $first,1 --precision bf16 --device cpu)
    do_ "${pets[@]}" --only pets-knn --set knn.subset.train=$pets_a_class --set knn.subset.test=$pets_a_class
    do_ "${pets[@]}" --only pets-trimaps --set segmentation.subset.train=$trimaps --set segmentation.subset.test=$trimaps
done
step scores-coco-2 "6 minutes on an H200 and 33 on one CPU core (trimaps)"
probes control/coco-2 --weights veca_small_patch16=runs/coco-2/final \
    --weights veca_tiny_patch16=runs/coco-2/siblings/tiny \
    --weights dense_vit_small=runs/coco-2/siblings/dense --cores 8,16,...,64 --verify
step scores-small-2 "4 minutes on an H200 and 36 on one CPU core (trimaps)"
probes control/small-2 --weights veca_small_patch16=runs/small-2/final --verify
step scores-dense-2 "44 minutes on one CPU core"
probes control/dense-2 --weights dense_vit_small=runs/dense-2/final --verify
step scores-pair-2 "3 minutes on an H200, 29 on one CPU core for two more seeds"
pair=(--weights veca_small_patch16=runs/pair-2/final --weights dense_vit_small=runs/pair-2/siblings/dense)
probes control/pair-2 "${pair[@]}" --cores 8,16,32,64 --teacher=
for seed in 1 2; do
    depth control/pair-2/scau-depth-$seed "${pair[@]}" --set seed=$seed
done
step scores-again-2 "5 minutes on an H200 and 11 on one CPU core (trimaps)"
probes control/again-2 --weights veca_small_patch16=runs/again-2/final --verify
step scores-dense-again-2 "19 minutes on one CPU core"
probes control/dense-again-2 --weights dense_vit_small=runs/dense-again-2/final --teacher= --verify
step scores-dense192-sizes "19 minutes on one CPU core"
probes control/dense192-sizes --weights dense_vit_small=runs/dense192-sizes/final --teacher= --verify
step collect "seconds; benchmarks/results/probes.csv from all records"
do_ python -m benchmarks collect $RECORDS
step finetune "about 15 minutes on one CPU core; fine-tuning beside frozen features"
do_ python -m benchmarks finetune --data "$PETS"

# --------------------------------------------------------------------------------------------- looks
part looks "what the students learnt, on photos of the validation split"

last=(--config $LATER/coco-192-again-sizes.toml --data "$COCO")
ours=(--weights veca_small_patch16=veca_small_patch16 --weights veca_tiny_patch16=veca_tiny_patch16)
step agreement "minutes on an H200, not timed"
do_ python -m research.agreement "${last[@]}" "${ours[@]}" --weights dense_vit_small=runs/dense192-sizes/final
step positions "minutes on one CPU core, not timed"
do_ python -m research.positions "${last[@]}" "${ours[@]}" --weights veca_small_control=runs/coco-2/final \
    --weights dense_vit_small=runs/coco-2/siblings/dense
step by-heart "not timed; rows of at192-sizes are kept"
do_ python -m research.by_heart "${last[@]}" --images 400 \
    --weights on192-sizes=runs/on192-sizes/final --weights on192-sizes/tiny=runs/on192-sizes/siblings/tiny \
    --weights coco-2=runs/coco-2/final --weights coco-2/tiny=runs/coco-2/siblings/tiny \
    --weights coco-2/dense=runs/coco-2/siblings/dense \
    --weights small-2=runs/small-2/final --weights dense-2=runs/dense-2/final \
    --weights pair-2=runs/pair-2/final --weights pair-2/dense=runs/pair-2/siblings/dense \
    --weights again-2=runs/again-2/final --weights again-2/tiny=runs/again-2/siblings/tiny \
    --weights again192-sizes=veca_small_patch16 --weights again192-sizes/tiny=veca_tiny_patch16 \
    --weights dense-again-2=runs/dense-again-2/final --weights dense192-sizes=runs/dense192-sizes/final
step first-core "not timed; rows of further-1 are kept"
do_ python -m research.first_core --config $LATER/coco-stage1-longer.toml --data "$COCO" \
    --weights small-1=runs/small-1/final --weights tiny-1=runs/tiny-1/final
step teacher-sizes "minutes on one CPU core, not timed"
do_ python -m research.teacher_sizes --config $LATER/coco-stage1.toml --data "$COCO" --images 128
step routing "33 minutes on one CPU core"
do_ python -m research.routing --seeds 0 1 2

# --------------------------------------------------------------------------------------------- speed
part speed "benchmarks of this machine; python -m benchmarks --list has them all"

step speed-gpu "minutes on an H200, not timed"
for name in attention model train distill recorded; do
    do_ python -m benchmarks $name
done
step speed-cpu "a quarter of an hour on one idle CPU core"
do_ python -m benchmarks cpu
step speed-embed "minutes on two CPU cores, not timed"
do_ python -m benchmarks embed
step speed-export "minutes on one CPU core, not timed"
do_ python -m benchmarks export_speed
step speed-probes "11 minutes on two CPU cores"
do_ python -m benchmarks probe_sweep --pets "$PETS" --threads 2

# --------------------------------------------------------------------------------------------- pages
part pages "tables and plots of README, docs, cards and diary, from the results files"

step tables "seconds"
do_ python -m benchmarks tables
do_ python -m research.tables
step plots "seconds"
do_ python -m benchmarks plot
}

mode=names known=" "
steps
for name in "${wanted[@]}"; do
    if [[ $known != *" $name "* ]]; then
        echo "no part and no step is called $name; --list shows them." >&2
        exit 2
    fi
done
mode=$doing
steps
