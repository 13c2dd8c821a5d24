// The legend, the plan and the running requests.

import { palette } from "./colors.js";
import { byId, bytes, count, element, percent, plural, swatch } from "./dom.js";

const MOST_REQUESTS = 64;

/** Say what the colours of the map mean. */
export function showLegend(pool, mode) {
  const colours = palette();
  const entries = mode === "group"
    ? [...pool.groups.keys()].flatMap((group) => [
        [colours.group.used(group), `group ${group} in use`],
        [colours.group.cached(group), "cached"],
        [colours.group.free(group), "free page"],
      ])
    : [
        [colours.request.used(0), "a colour for each request"],
        [colours.request.cached, "cached"],
        [colours.request.free, "free page"],
      ];
  entries.push([colours.ground, "slab lent to nobody"]);
  const items = entries.map(([colour, text]) => element("li", {}, swatch(colour), ` ${text}`));
  byId("legend").replaceChildren(...items);
}

/** Show the facts of the plan, and what its groups have now. */
export function showPlan(plan, pools) {
  const total = plan.classes.reduce((sum, pool) => sum + pool.num_slabs * pool.slab_bytes, 0);
  const slabs = plan.classes.map((pool) => `${plural(pool.num_slabs, "slab")} of ${bytes(pool.slab_bytes)}`);
  byId("plan-facts").textContent = plan.classes.length
    ? `${bytes(total)}: ${slabs.join(", ")}; requests of up to ${count(plan.max_model_len)} tokens`
    : `no cache; requests of up to ${count(plan.max_model_len)} tokens`;
  const counts = pools.map((pool) => pool.counts());
  const rows = plan.classes.flatMap((pool, i) => pool.groups.map((group) => groupRow(group, counts[i]?.get(group.group))));
  byId("plan").replaceChildren(...rows);
}

function groupRow(group, now = { slabs: 0, used: 0, cached: 0, free: 0 }) {
  const pages = Math.max(1, now.used + now.cached + now.free);
  const share = (number) => element("td", {}, count(number), element("span", { class: "note" }, ` ${percent(number / pages)}`));
  const cells = [
    group.keeps, count(group.num_layers), plural(group.block_size, "token"), bytes(group.page_bytes),
    plural(group.pages_per_slab, "page"), count(now.slabs),
  ].map((text) => element("td", {}, text));
  const head = element("th", { scope: "row" }, swatch(palette().group.used(group.group)), ` ${group.group}`);
  return element("tr", {}, head, ...cells, share(now.used), share(now.cached), share(now.free));
}

/** The list of running requests; pointing at one points it out on the map. */
export class Requests {
  constructor(onPoint) {
    this.list = byId("requests");
    this.onPoint = onPoint;
    this.rows = new Map(); // id -> {node, text, bar}
    this.more = element("li", { class: "note" });
  }

  show(requests) {
    const shown = requests.slice(0, MOST_REQUESTS);
    const ids = new Set(shown.map(({ id }) => id));
    for (const [id, { node }] of this.rows) {
      if (ids.has(id)) continue;
      if (node.matches(":hover, :focus-within")) this.onPoint(null);
      node.remove();
      this.rows.delete(id);
    }
    for (const request of shown) this.update(request);
    const rest = requests.length - shown.length;
    this.more.textContent = requests.length ? `and ${plural(rest, "more")}` : "Nothing runs.";
    this.more.hidden = requests.length > 0 && rest === 0;
    this.list.append(this.more);
  }

  update({ id, prompt, output, computed, cached }) {
    const row = this.rows.get(id) ?? this.add(id);
    row.swatch.style.backgroundColor = swatch(palette().request.used(Number(id))).style.backgroundColor;
    row.text.textContent = `${count(prompt)} + ${count(output)} tokens`;
    row.note.textContent = computed < prompt ? `${percent(computed / prompt)} of the prompt computed`
      : cached ? `${percent(cached / prompt)} of the prompt was cached` : "";
  }

  add(id) {
    const row = { swatch: swatch([0, 0, 0]), text: element("span"), note: element("span", { class: "note" }) };
    const button = element("button", { type: "button" }, row.swatch, element("b", {}, `Request ${id}`), row.text, row.note);
    for (const event of ["pointerenter", "focus"]) button.addEventListener(event, () => this.onPoint(id));
    for (const event of ["pointerleave", "blur"]) button.addEventListener(event, () => this.onPoint(null));
    row.node = element("li", {}, button);
    this.list.append(row.node);
    this.rows.set(id, row);
    return row;
  }
}
