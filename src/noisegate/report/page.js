"use strict";
// Draws every chart with the colors of the style sheet, again when the theme changes and before printing. Tables can be
// sorted by a column, and one that does not fit becomes a list of blocks, so that nothing of it is cut off.
(function () {
  const SHEET = 660; // pixels: the width of A4 within its margins
  const root = document.documentElement;
  const charts = Array.from(document.querySelectorAll(".plot"));
  const boxes = Array.from(document.querySelectorAll(".scroll"));
  let printed = false;

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

  function fit() {
    for (const box of boxes) box.classList.remove("stacked");
    const wide = printed ? [] : boxes.filter((box) => box.scrollWidth > box.clientWidth + 1);
    for (const box of wide) box.classList.add("stacked");
  }

  // What a cell is sorted by: a number in a column of numbers, else its words. null, if there is nothing, comes last.
  function key(row, i, numeric) {
    const words = row.cells[i] ? row.cells[i].textContent.trim() : "";
    if (!numeric) return words === "" || words === "–" ? null : words;
    const value = parseFloat(words.replace(/[,±]/g, ""));
    return Number.isNaN(value) ? null : value;
  }

  function sortable(table) {
    const heads = Array.from(table.tHead.rows[0].cells);
    const body = table.tBodies[0];
    const rows = Array.from(body.rows); // as they were written
    const words = new Intl.Collator("en", { numeric: true });
    const next = { ascending: "descending", descending: "none" };
    heads.forEach((head, i) => {
      const numeric = head.classList.contains("number");
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent;
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const order = next[head.getAttribute("aria-sort")] || "ascending";
        for (const other of heads) other.removeAttribute("aria-sort");
        if (order === "none") return body.append(...rows);
        head.setAttribute("aria-sort", order);
        const sign = order === "ascending" ? 1 : -1;
        const keyed = rows.map((row) => [key(row, i, numeric), row]);
        keyed.sort(([a], [b]) => {
          if (a === null || b === null) return (a === null) - (b === null);
          return sign * (numeric ? a - b : words.compare(a, b));
        });
        body.append(...keyed.map(([, row]) => row));
      });
    });
  }

  function forPaper(on) {
    if (on === printed) return;
    printed = on;
    root.classList.toggle("paper", on);
    for (const folded of document.querySelectorAll("details.printed")) folded.open = on;
    fit();
    draw(on ? SHEET : 0);
  }

  for (const table of document.querySelectorAll("table")) {
    // A block of names and values is still a table to those who hear it.
    table.setAttribute("role", "table");
    for (const part of [table.tHead, ...table.tBodies]) part.setAttribute("role", "rowgroup");
    for (const row of table.rows) row.setAttribute("role", "row");
    for (const cell of table.querySelectorAll("th")) cell.setAttribute("role", "columnheader");
    for (const cell of table.querySelectorAll("td")) cell.setAttribute("role", "cell");
  }
  for (const table of document.querySelectorAll("table.sortable")) sortable(table);
  fit();
  for (const folded of document.querySelectorAll("details")) folded.addEventListener("toggle", fit);
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width) fit();
    width = innerWidth;
  });
  draw(0);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw(printed ? SHEET : 0));
  addEventListener("beforeprint", () => forPaper(true));
  addEventListener("afterprint", () => forPaper(false));
})();
