(() => {
  "use strict";
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];

  // The contents: open beside the page, closed above it; the section in view is marked.
  const contents = document.querySelector(".contents");
  if (contents) {
    const wide = matchMedia("(min-width: 72rem)");
    const fit = () => { contents.open = wide.matches; };
    fit();
    wide.addEventListener("change", fit);
    contents.querySelector("summary").addEventListener("click", (event) => {
      if (wide.matches) event.preventDefault();
    });
    const links = new Map(all("a", contents).map((link) => [link.hash.slice(1), link]));
    const headings = all("h2[id], h3[id]");
    const mark = () => {
      let here = headings[0];
      for (const heading of headings) {
        if (heading.getBoundingClientRect().top < innerHeight / 3) here = heading;
      }
      for (const [id, link] of links) link.classList.toggle("here", here && id === here.id);
    };
    let waiting = false;
    addEventListener("scroll", () => {
      if (waiting) return;
      waiting = true;
      requestAnimationFrame(() => { waiting = false; mark(); });
    }, { passive: true });
    mark();
  }

  // The lightbox: a click enlarges, arrow keys go to the neighbours, Escape closes.
  const box = document.querySelector(".lightbox");
  if (!box) return;
  const part = (name) => box.querySelector(`.${name}`);
  let group = [], across = 1, at = 0;

  function show(index) {
    at = (index + group.length) % group.length;
    const { title = "", caption = "", full = "" } = group[at].dataset;
    const small = group[at].querySelector("svg, img");
    const picture = small.cloneNode(true);
    const view = small.viewBox?.baseVal;
    const ratio = view ? view.width / view.height : small.naturalWidth / small.naturalHeight;
    picture.style.setProperty("--ratio", ratio || 1);
    if (picture.tagName === "IMG" && group[at].closest(".plots")) picture.classList.add("plain");
    if (full) {  // the file itself, where it is still there and the browser can show it
      picture.addEventListener("error", () => { picture.src = small.src; }, { once: true });
      picture.src = full;
    }
    part("stage").replaceChildren(picture);
    part("title").textContent = title;
    part("caption").textContent = caption;
    part("count").textContent = group.length > 1 ? `${at + 1} / ${group.length}` : "";
    for (const name of ["previous", "next"]) part(name).hidden = group.length < 2;
  }

  for (const zoom of all(".zoom")) {
    zoom.addEventListener("click", () => {
      const home = zoom.closest("[data-group]");
      group = home ? all(".zoom", home) : [zoom];
      across = Number(home?.dataset.group) || 1;
      show(group.indexOf(zoom));
      box.showModal();
    });
  }
  part("previous").addEventListener("click", () => show(at - 1));
  part("next").addEventListener("click", () => show(at + 1));
  part("close").addEventListener("click", () => box.close());
  box.addEventListener("click", (event) => {
    if (event.target === box || event.target === part("stage")) box.close();
  });
  box.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -across, ArrowDown: across }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    show(at + step);
  });
})();
