// What int8 blocks do to rows between two products, each step in one pass over memory.
//
// `veca.native` compiles this where there is a compiler and calls it; `veca.precision` has the
// same steps in torch. Rows are independent, and threads change nothing.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr float largest = 127.0f;
constexpr float least = 1.17549435e-38f * largest;

struct Bf16 {
    uint16_t bits;
};

inline float wide(float x) { return x; }

inline float wide(Bf16 x) {
    uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float y;
    std::memcpy(&y, &bits, sizeof y);
    return y;
}

inline void store(float x, float* out) { *out = x; }

inline void store(float x, Bf16* out) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    out->bits = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// e^x to about 2 units in the last place, for x within +-87: a power of two by its bits, and the
// series of the rest.
inline float exponential(float x) {
    float scaled = x * 1.44269504f;
    float whole = std::nearbyint(scaled);
    float f = (scaled - whole) * 0.693147181f;
    float series = 1.0f + f * (1.0f + f * (0.5f + f * (0.166666667f + f * (0.0416666667f
                   + f * (0.00833333333f + f * 0.00138888889f)))));
    uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(whole) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return series * power;
}

inline float clamped(float x, float low, float high) {
    x = x < low ? low : x;
    return x > high ? high : x;
}

// A token as int8 with its own scale.
inline void quantise(const float* x, int64_t n, int8_t* out, float* scale) {
    float top = 0.0f;
#pragma omp simd reduction(max : top)
    for (int64_t i = 0; i < n; ++i) {
        float size = std::fabs(x[i]);
        top = size > top ? size : top;
    }
    float step = (top > least ? top : least) / largest, inverse = 1.0f / step;
    *scale = step;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i)
        out[i] = static_cast<int8_t>(static_cast<int32_t>(std::nearbyint(x[i] * inverse)));
}

inline void normalise(
    const float* x, const float* weight, const float* bias, float eps, int64_t n, float* out) {
    float sum = 0.0f, squares = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; ++i) sum += x[i];
    float mean = sum / static_cast<float>(n);
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < n; ++i) squares += (x[i] - mean) * (x[i] - mean);
    float scale = 1.0f / std::sqrt(squares / static_cast<float>(n) + eps);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) out[i] = (x[i] - mean) * scale * weight[i] + bias[i];
}

// Each row by `one(row, scratch)`, on so many threads.
template <class One>
void rows(int64_t count, int64_t scratch, int64_t threads, One one) {
#pragma omp parallel num_threads(static_cast<int>(threads)) if (threads > 1)
    {
        std::vector<float> own(static_cast<size_t>(scratch));
#pragma omp for schedule(static)
        for (int64_t row = 0; row < count; ++row) one(row, own.data());
    }
}

// Queries and keys turned, and values, from sums [rows, 3, heads, 2 * half] to
// out[3, images, heads, room, 2 * half], rows from `first` on; an image has `tokens` of them.
template <class Out>
void turn(const int32_t* sums, const float* channel, const float* bias, const float* token,
    const float* cos, const float* sin, int64_t count, int64_t heads, int64_t half, int64_t first,
    int64_t images, int64_t tokens, int64_t room, Out* out, int64_t threads) {
    int64_t width = 2 * half, all = heads * width;
    rows(count, 0, threads, [&](int64_t row, float*) {
        float scale = token[row];
        const float *c = cos + row * half, *s = sin + row * half;
        uint32_t place = static_cast<uint32_t>(first + row), each = static_cast<uint32_t>(tokens);
        int64_t image = place / each, token_of = place % each;
        for (int64_t part = 0; part < 3; ++part)
            for (int64_t head = 0; head < heads; ++head) {
                int64_t at = part * all + head * width;
                const int32_t* sum = sums + row * 3 * all + at;
                const float *w = channel + at, *b = bias + at;
                Out* to = out
                          + (((part * images + image) * heads + head) * room + token_of) * width;
                if (part == 2) {
#pragma omp simd
                    for (int64_t i = 0; i < width; ++i)
                        store(static_cast<float>(sum[i]) * w[i] * scale + b[i], to + i);
                    continue;
                }
#pragma omp simd
                for (int64_t i = 0; i < half; ++i) {
                    float even = static_cast<float>(sum[i]) * w[i] * scale + b[i];
                    float odd = static_cast<float>(sum[half + i]) * w[half + i] * scale
                                + b[half + i];
                    store(even * c[i] - odd * s[i], to + i);
                    store(even * s[i] + odd * c[i], to + half + i);
                }
            }
    });
}

// The first rows of what attention found for an image, mixed[images, heads, room, width], as int8 of
// all heads.
template <class In>
void gather(const In* mixed, int64_t count, int64_t heads, int64_t width, int64_t image,
    int64_t room, int8_t* out, float* token, int64_t threads) {
    int64_t all = heads * width;
    rows(count, all, threads, [&](int64_t row, float* own) {
        for (int64_t head = 0; head < heads; ++head) {
            const In* from = mixed + ((image * heads + head) * room + row) * width;
#pragma omp simd
            for (int64_t i = 0; i < width; ++i) own[head * width + i] = wide(from[i]);
        }
        quantise(own, all, out + row * all, token + row);
    });
}

}  // namespace

extern "C" {

int64_t veca_version() { return 1; }

// A norm, and its rows as int8.
void veca_norm(const float* x, const float* weight, const float* bias, float eps, int64_t count,
    int64_t n, int8_t* out, float* token, int64_t threads) {
    rows(count, n, threads, [&](int64_t row, float* own) {
        normalise(x + row * n, weight, bias, eps, n, own);
        quantise(own, n, out + row * n, token + row);
    });
}

void veca_turn_bf16(const int32_t* sums, const float* channel, const float* bias,
    const float* token, const float* cos, const float* sin, int64_t count, int64_t heads,
    int64_t half, int64_t first, int64_t images, int64_t tokens, int64_t room, void* out,
    int64_t threads) {
    turn(sums, channel, bias, token, cos, sin, count, heads, half, first, images, tokens, room,
        static_cast<Bf16*>(out), threads);
}

void veca_turn_float(const int32_t* sums, const float* channel, const float* bias,
    const float* token, const float* cos, const float* sin, int64_t count, int64_t heads,
    int64_t half, int64_t first, int64_t images, int64_t tokens, int64_t room, void* out,
    int64_t threads) {
    turn(sums, channel, bias, token, cos, sin, count, heads, half, first, images, tokens, room,
        static_cast<float*>(out), threads);
}

// Softmax in place of the first n of each row's `room` scores; the rest become zero.
void veca_softmax_bf16(void* scores, int64_t count, int64_t n, int64_t room, int64_t threads) {
    Bf16* all = static_cast<Bf16*>(scores);
    rows(count, n, threads, [&](int64_t row, float* own) {
        Bf16* x = all + row * room;
        float top = -3.4e38f, sum = 0.0f;
#pragma omp simd reduction(max : top)
        for (int64_t i = 0; i < n; ++i) {
            own[i] = wide(x[i]);
            top = own[i] > top ? own[i] : top;
        }
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < n; ++i) {
            own[i] = exponential(clamped(own[i] - top, -87.0f, 0.0f));
            sum += own[i];
        }
        float share = 1.0f / sum;
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) store(own[i] * share, x + i);
        if (n < room) std::memset(x + n, 0, static_cast<size_t>(room - n) * sizeof *x);
    });
}

void veca_gather_bf16(const void* mixed, int64_t count, int64_t heads, int64_t width,
    int64_t image, int64_t room, int8_t* out, float* token, int64_t threads) {
    gather(static_cast<const Bf16*>(mixed), count, heads, width, image, room, out, token, threads);
}

void veca_gather_float(const void* mixed, int64_t count, int64_t heads, int64_t width,
    int64_t image, int64_t room, int8_t* out, float* token, int64_t threads) {
    gather(static_cast<const float*>(mixed), count, heads, width, image, room, out, token,
        threads);
}

// What a product gave, added to `x`: into `after`, and through a norm as int8.
void veca_add_norm(const int32_t* sums, const float* channel, const float* shift,
    const float* token, const float* x, const float* weight, const float* bias, float eps,
    int64_t count, int64_t n, float* after, int8_t* out, float* scales, int64_t threads) {
    rows(count, n, threads, [&](int64_t row, float* own) {
        float scale = token[row], *to = after + row * n;
        const float* from = x + row * n;
        const int32_t* sum = sums + row * n;
#pragma omp simd
        for (int64_t i = 0; i < n; ++i)
            to[i] = from[i] + (static_cast<float>(sum[i]) * channel[i] * scale + shift[i]);
        normalise(to, weight, bias, eps, n, own);
        quantise(own, n, out + row * n, scales + row);
    });
}

// silu(gate) * value as int8, from sums [rows, 2 * n].
void veca_gate(const int32_t* sums, const float* channel, const float* bias, const float* token,
    int64_t count, int64_t n, int8_t* out, float* scales, int64_t threads) {
    rows(count, n, threads, [&](int64_t row, float* own) {
        float scale = token[row];
        const int32_t *gates = sums + row * 2 * n, *values = gates + n;
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) {
            float gate = static_cast<float>(gates[i]) * channel[i] * scale + bias[i];
            float value = static_cast<float>(values[i]) * channel[n + i] * scale + bias[n + i];
            own[i] = gate / (1.0f + exponential(clamped(-gate, -87.0f, 87.0f))) * value;
        }
        quantise(own, n, out + row * n, scales + row);
    });
}

// What a product gave, added to `x` in place.
void veca_add(const int32_t* sums, const float* channel, const float* bias, const float* token,
    int64_t count, int64_t n, float* x, int64_t threads) {
    rows(count, 0, threads, [&](int64_t row, float*) {
        float scale = token[row], *to = x + row * n;
        const int32_t* sum = sums + row * n;
#pragma omp simd
        for (int64_t i = 0; i < n; ++i)
            to[i] += static_cast<float>(sum[i]) * channel[i] * scale + bias[i];
    });
}

}  // extern "C"
