"use strict";
// Draws every chart with the colors of the style sheet, again when the theme changes and before printing.
(function () {
  const SHEET = 660; // pixels: the width of A4 within its margins
  const root = document.documentElement;
  const charts = Array.from(document.querySelectorAll(".plot"));

  // A text such as "--grid" stands for the style sheet's variable of that name.
  function colored(value, style) {
    if (typeof value === "string") return value.startsWith("--") ? style.getPropertyValue(value).trim() : value;
    if (Array.isArray(value)) return value.map((entry) => colored(entry, style));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, entry]) => [key, colored(entry, style)]));
  }

  function draw(width) {
    const style = getComputedStyle(root);
    const touch = matchMedia("(pointer: coarse)").matches;
    const options = {
      displaylogo: false,
      responsive: !width,
      displayModeBar: !width && matchMedia("(hover: hover)").matches ? "hover" : false,
      modeBarButtons: [["toImage"], ["zoom2d", "pan2d"], ["zoomIn2d", "zoomOut2d", "resetScale2d"]], // none that sends
    };
    for (const place of charts) {
      const chart = colored(JSON.parse(document.getElementById(place.id + "-data").textContent), style);
      if (width) Object.assign(chart.layout, { width: width, autosize: false });
      else chart.layout.autosize = true;
      if (touch) chart.layout.dragmode = false; // a finger that moves over a chart scrolls the page
      Plotly.react(place, chart.data, chart.layout, options);
    }
    root.dataset.drawn = charts.length;
  }

  let printed = false;
  function forPaper(on) {
    if (on === printed) return;
    printed = on;
    root.classList.toggle("paper", on);
    for (const folded of document.querySelectorAll("details.printed")) folded.open = on;
    draw(on ? SHEET : 0);
  }

  draw(0);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw(printed ? SHEET : 0));
  addEventListener("beforeprint", () => forPaper(true));
  addEventListener("afterprint", () => forPaper(false));
})();
