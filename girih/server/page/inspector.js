// Tells whose page somebody looks at, and for which tokens it is held.

import { ask } from "./api.js";
import { palette } from "./colors.js";
import { count, element, plural, swatch } from "./dom.js";
import { CACHED, codeOf, isShared, NOBODY, NOTHING } from "./snapshot.js";

const REST_MS = 90; // how long the pointer rests before the engine is asked
const MOST_HOLDERS = 4;

export class Inspector {
  /** @param box where it is told. @param badge is shown while a page is held. */
  constructor(box, badge) {
    this.box = box;
    this.badge = badge;
    this.asked = null; // the page that an answer is waited for: "pool/slab/page"
    this.answer = null; // {key, facts}: the last one
    this.show(null, null, null);
  }

  /** @param place of MemoryMap.onLook. @param pool the pool that it is in. @param plan the groups' facts. */
  show(place, pool, plan) {
    this.badge.hidden = !place?.isHeld;
    if (!place) {
      this.forget();
      this.fill(element("p", { class: "note" }, "Nothing is pointed at."));
      return;
    }
    const group = pool.owners[place.slab];
    if (place.page === null || group === NOBODY) {
      this.forget();
      this.fill(...this.aboutSlabs(place, pool, plan));
      return;
    }
    const page = place.slab * pool.groups.get(group).perSlab + place.page;
    const value = pool.pages(place.slab)[place.page];
    const head = this.aboutPage(place, page, group, value, plan);
    const key = `${group}/${page}`;
    if (codeOf(value) === NOTHING || codeOf(value) === CACHED) {
      this.forget();
      const text = codeOf(value) === CACHED
        ? "A later prompt that begins alike can reuse it. Of its tokens only a hash is kept."
        : "It holds nothing; its slab is lent to this group.";
      this.fill(...head, element("p", { class: "note" }, text));
      return;
    }
    const known = this.answer?.key === key ? this.aboutHolders(this.answer.facts) : [];
    this.fill(...head, ...known);
    this.ask(key, group, page, head);
  }

  fill(...children) {
    const fresh = element("div", {}, ...children);
    // what has not changed is not read out again, twice a second
    if (fresh.innerHTML !== this.box.innerHTML) this.box.replaceChildren(...fresh.childNodes);
  }

  forget() {
    clearTimeout(this.timer);
    this.asked = this.answer = null;
  }

  /** Ask the engine about a page, once the pointer rests. */
  ask(key, group, page, head) {
    if (this.asked === key) return;
    clearTimeout(this.timer);
    this.asked = key;
    this.timer = setTimeout(async () => {
      let told;
      try {
        const response = await ask(`/dashboard/page?group=${group}&page=${page}`);
        const facts = await response.json();
        told = this.aboutHolders(facts);
        if (this.asked === key) this.answer = { key, facts };
      } catch (error) {
        told = [element("p", { class: "note" }, error.message)];
      }
      if (this.asked !== key) return; // somebody looks elsewhere by now
      this.asked = null;
      this.fill(...head, ...told);
    }, REST_MS);
  }

  aboutSlabs({ slab, end }, pool, plan) {
    const pages = new Map();
    let free = 0;
    for (let i = slab; i < end; i += 1) {
      if (pool.owners[i] === NOBODY) free += 1;
      else pages.set(pool.owners[i], [...(pages.get(pool.owners[i]) ?? []), ...pool.pages(i)]);
    }
    const name = end - slab === 1 ? `Slab ${count(slab)}` : `Slabs ${count(slab)} to ${count(end - 1)}`;
    const lines = [...pages].map(([group, values]) => {
      const cached = values.filter((value) => codeOf(value) === CACHED).length;
      const nothing = values.filter((value) => codeOf(value) === NOTHING).length;
      const used = values.length - cached - nothing;
      const text = ` ${groupName(group, plan)}: ${count(used)} in use, ${count(cached)} cached, ${count(nothing)} free`;
      return element("p", {}, swatch(palette().group.used(group)), text);
    });
    if (free) lines.push(element("p", {}, swatch(palette().ground), ` ${plural(free, "slab")} lent to nobody`));
    return [element("p", { class: "title" }, name), ...lines];
  }

  aboutPage(place, page, group, value, plan) {
    const state = codeOf(value) === NOTHING ? "free" : codeOf(value) === CACHED ? "cached" : "in use";
    const colours = palette().group;
    const colour = { free: colours.free, cached: colours.cached, "in use": colours.used }[state](group);
    return [
      element("p", { class: "title" }, `Page ${count(page)}`, element("span", { class: "badge" }, state),
        isShared(value) ? element("span", { class: "badge" }, "shared") : null),
      element("p", {}, swatch(colour), ` ${groupName(group, plan)}, slab ${count(place.slab)}`),
    ];
  }

  aboutHolders({ is_cached: isCached, holders }) {
    const shown = holders.slice(0, MOST_HOLDERS).map((holder) => aboutHolder(holder));
    const more = holders.length - shown.length;
    if (more > 0) shown.push(element("p", { class: "note" }, `and ${plural(more, "more request")}`));
    if (!holders.length) shown.push(element("p", { class: "note" }, "Whoever held it has just ended."));
    if (isCached) shown.push(element("p", { class: "note" }, "Other prompts can find it in the cache."));
    return shown;
  }
}

function groupName(group, plan) {
  const facts = plan?.classes.flatMap((pool) => pool.groups).find((one) => one.group === group);
  return facts ? `Group ${group}, ${facts.keeps}` : `Group ${group}`;
}

function aboutHolder({ request, request_id: id, first_token: first, end_token: end, is_hidden: isHidden, tokens }) {
  const range = end > first ? `tokens ${count(first)} to ${count(end - 1)}` : "no token yet";
  const lines = [
    element("p", {}, swatch(palette().request.used(Number(request))), element("b", {}, ` Request ${request}`), `, ${range}`),
  ];
  if (id) lines.push(element("p", { class: "note" }, id));
  if (isHidden) lines.push(element("p", { class: "note" }, "The text is shown to the API key that it belongs to."));
  else if (tokens.length) lines.push(element("p", { class: "tokens" }, ...tokens.map((text) => element("span", {}, text))));
  return element("div", { class: "holder" }, ...lines);
}
