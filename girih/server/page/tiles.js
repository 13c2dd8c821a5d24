// The numbers on top, each with its last two minutes.

import { byId, count, element, percent, plural, setText } from "./dom.js";

const HISTORY = 240; // samples, two a second
const RATE_S = 3; // what "now" means for a rate
const RECENT_S = 60;
const SVG = "http://www.w3.org/2000/svg";

const REASONS = {
  capacity: "for pages",
  max_num_seqs: "for a request to end",
  budget: "for a share of a step",
  preempted: "having lost their pages",
};

class Tile {
  constructor(name) {
    this.value = element("span", { class: "value" });
    this.note = element("span", { class: "note" });
    this.ground = document.createElementNS(SVG, "polygon");
    this.line = document.createElementNS(SVG, "polyline");
    const graph = document.createElementNS(SVG, "svg");
    graph.setAttribute("viewBox", `0 0 ${HISTORY} 32`);
    graph.setAttribute("preserveAspectRatio", "none");
    graph.setAttribute("aria-hidden", "true");
    graph.append(this.ground, this.line);
    this.node = element("div", { class: "card tile" }, element("h2", {}, name), this.value, this.note, graph);
    this.history = [];
  }

  show(value, text, note, most = null) {
    setText(this.value, text);
    setText(this.note, note);
    this.history = [...this.history.slice(1 - HISTORY), value];
    const highest = most ?? Math.max(1e-9, ...this.history);
    const left = HISTORY - this.history.length;
    const points = this.history.map((one, i) => `${left + i},${(30 - (28 * one) / highest).toFixed(1)}`);
    this.line.setAttribute("points", points.join(" "));
    this.ground.setAttribute("points", [`${left},32`, ...points, `${HISTORY - 1},32`].join(" "));
  }
}

export class Tiles {
  constructor() {
    const names = ["Throughput", "Cache hits", "Running", "Waiting", "Pool in use"];
    this.tiles = names.map((name) => new Tile(name));
    byId("tiles").append(...this.tiles.map((tile) => tile.node));
    this.samples = []; // {time, tokens, looked, hit} of the last minute
  }

  show({ head }, plan) {
    const { stats } = head;
    const { cache } = stats;
    this.take({
      time: head.time_s, tokens: head.num_output_tokens, looked: cache.tokens_looked_up, hit: cache.tokens_hit,
    });
    const [throughput, hits, running, waiting, pool] = this.tiles;
    const rate = this.rate();
    throughput.show(rate, `${rate < 10 ? rate.toFixed(1) : count(rate)}`, `tokens/s; ${count(head.num_output_tokens)} so far`);
    const { looked, hit } = this.since(RECENT_S);
    const recent = looked > 0 ? hit / looked : 0;
    const all = cache.tokens_looked_up ? cache.tokens_hit / cache.tokens_looked_up : 0;
    const lately = looked > 0 ? `${percent(recent)} in the last minute` : "no prompt in the last minute";
    hits.show(all, percent(all), `of ${count(cache.tokens_looked_up)} prompt tokens; ${lately}`, 1);
    running.show(stats.num_running, count(stats.num_running), runningNote(stats, plan));
    waiting.show(stats.num_waiting, count(stats.num_waiting), waitingNote(stats));
    pool.show(stats.kv_cache_usage, percent(stats.kv_cache_usage), poolNote(head), 1);
  }

  take(sample) {
    const last = this.samples.at(-1);
    if (last && (sample.tokens < last.tokens || sample.looked < last.looked)) this.samples = []; // it started anew
    if (last?.time !== sample.time) this.samples.push(sample);
    while (this.samples[0].time < sample.time - RECENT_S) this.samples.shift();
  }

  /** What has come since so many seconds ago. */
  since(seconds) {
    const last = this.samples.at(-1);
    const first = this.samples.find((sample) => sample.time >= last.time - seconds);
    const differences = Object.keys(last).map((name) => [name, last[name] - first[name]]);
    return Object.fromEntries(differences);
  }

  rate() {
    const { time, tokens } = this.since(RATE_S);
    return time > 0 ? tokens / time : 0;
  }
}

function runningNote(stats, plan) {
  const most = plan ? `of at most ${count(plan.max_num_seqs)}` : "";
  return stats.num_preemptions ? `${most}; ${plural(stats.num_preemptions, "preemption")}` : most;
}

function waitingNote({ waiting_by_reason: reasons }) {
  const named = Object.entries(reasons).filter(([, number]) => number > 0);
  return named.map(([reason, number]) => `${count(number)} ${REASONS[reason] ?? reason}`).join(", ") || "nobody waits";
}

function poolNote({ stats, classes }) {
  const all = classes.reduce((sum, pool) => sum + pool.num_slabs, 0);
  return `of ${plural(all, "slab")}; ${count(stats.cache.num_free_slabs)} lent to nobody`;
}
