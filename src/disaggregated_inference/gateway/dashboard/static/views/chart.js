// One chart over time. uPlot draws on a canvas when its data or its size changes, and at no other time.
import { Component, html } from "../html.js";
import { momentFormat } from "../format.js";

const HEIGHT = 170;
const DASHES = [undefined, [6, 3], [2, 3]];
const BORDERS = ["solid", "dashed", "dotted"]; // of the legend, for the same lines

// Canvas needs colours as numbers: those of the palette, as the browser resolves them for the theme.
function colour(name) {
  const probe = document.createElement("span");
  probe.className = `ink-${name}`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

// Points are drawn where there is no line: beside a gap.
const lonely = (values) => values.flatMap((value, index) => (value != null && (values[index - 1] == null || values[index + 1] == null) ? [index] : []));

const DAY_S = 86400;
const DAY = { month: "short", day: "numeric" };
const HOURS = momentFormat({});
const DAYS = new Intl.DateTimeFormat([], DAY);
const length = (times) => times.at(-1) - times[0];
const moment = (time, times) => (length(times) > 2 * DAY_S ? DAYS : HOURS).format(time * 1000);

// Of the legend: no longer than it must be, so that its values stand on one line. By whether it has days, and seconds.
const SECOND = { second: "2-digit" };
const EXACT = [[HOURS, momentFormat(SECOND)], [momentFormat(DAY), momentFormat({ ...DAY, ...SECOND })]];
const exactly = (time, times, step) => EXACT[length(times) > DAY_S / 2 ? 1 : 0][step < 60 ? 1 : 0].format(time * 1000);

export class Chart extends Component {
  componentDidMount() {
    this.dark = matchMedia("(prefers-color-scheme: dark)");
    this.dark.addEventListener("change", this.draw);
    this.sizes = new ResizeObserver(() => this.plot?.setSize(this.size()));
    this.draw();
    this.sizes.observe(this.place);
  }

  componentDidUpdate(before) {
    if (before.theme !== this.props.theme || before.lines.length !== this.props.lines.length) this.draw();
    else if (before.times !== this.props.times) {
      this.plot?.setData(this.data());
      this.showLast();
    }
  }

  componentWillUnmount() {
    this.dark.removeEventListener("change", this.draw);
    this.sizes.disconnect();
    clearTimeout(this.showing);
    this.plot?.destroy();
  }

  size = () => ({ width: Math.max(200, this.place.clientWidth), height: HEIGHT });
  data = () => [this.props.times, ...this.props.lines.map((line) => line.values)];

  draw = () => {
    const { lines, show } = this.props;
    const muted = colour("muted");
    const grid = { stroke: colour("line"), width: 1 };
    const axis = { stroke: muted, grid, ticks: grid, font: "11px system-ui" };
    this.plot?.destroy();
    const options = {
      ...this.size(),
      cursor: { y: false, drag: { x: false, y: false }, points: { size: 6 } },
      legend: { live: true, markers: { width: 2, dash: (_, number) => BORDERS[lines[number - 1]?.dash ?? number - 1] } },
      scales: { x: { time: true }, y: { range: (_, low, high) => [0, high > 0 ? high * 1.08 : 1] } },
      axes: [{ ...axis, space: 62, values: (_, splits) => splits.map((time) => moment(time, this.props.times)) }, { ...axis, size: 66, values: (_, values) => values.map(show), space: 34 }],
      series: [
        { value: (_, time) => (time == null ? "–" : exactly(time, this.props.times, this.props.step)) },
        ...lines.map((line, index) => ({
          label: line.name,
          stroke: colour(line.colour || "prefill"),
          width: 1.5,
          dash: DASHES[line.dash ?? index],
          spanGaps: true,
          points: { show: true, size: 5, filter: (plot, number) => lonely(plot.data[number]) },
          value: (_, value) => show(value),
        })),
      ],
    };
    this.plot = new uPlot(options, this.data(), this.place);
    this.showLast();
  };

  // Without a pointer over it, the legend has the last values.
  showLast() {
    clearTimeout(this.showing);
    this.showing = setTimeout(() => this.showLastNow(), 50); // uPlot ends its own drawing first
  }

  showLastNow() {
    const found = this.props.times.findLastIndex((_, index) => this.props.lines.some((line) => line.values[index] != null));
    if (found >= 0) this.plot.setLegend({ idx: found });
  }

  render({ title, about, lines, show }) {
    const last = lines.map((line) => `${line.name} ${show(line.values.findLast((value) => value != null))}`).join(", ");
    const empty = lines.every((line) => line.values.every((value) => value == null));
    return html`
      <figure class="panel chart" data-chart=${title}>
        <figcaption><h2>${title}</h2><span class="muted">${about}</span></figcaption>
        <div class="frame">
          <div class="plot" role="img" aria-label="${title}: ${empty ? "nothing measured in this time" : `last ${last}`}" ref=${(element) => (this.place = element)}></div>
          ${empty && html`<p class="nothing"><span>nothing measured in this time</span></p>`}
        </div>
      </figure>`;
  }
}
