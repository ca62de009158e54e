// Small plots of the last few minutes: one figure a quantity, an SVG line each.

const KEPT = 120;

export class Plot {
  constructor(parent, title, shown) {
    this.values = [];
    this.shown = shown;
    const figure = document.createElement("figure");
    const caption = document.createElement("figcaption");
    this.now = document.createElement("strong");
    caption.append(title, this.now);
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("viewBox", `0 0 ${KEPT - 1} 100`);
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", `${title} over the last minutes`);
    this.line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
    svg.append(this.line);
    figure.append(caption, svg);
    parent.append(figure);
  }

  add(value) {
    this.values.push(value);
    if (this.values.length > KEPT) this.values.shift();
    this.now.textContent = this.shown(value);
    const top = Math.max(1e-9, ...this.values);
    const start = KEPT - this.values.length;
    this.line.setAttribute("points", this.values.map((v, i) => `${start + i},${98 - (v / top) * 94}`).join(" "));
  }
}
