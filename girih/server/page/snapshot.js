// What the engine showed at one moment, as girih/server/snapshot.py writes it.

export const NOBODY = -1;
export const NOTHING = 0;
export const CACHED = 1;
const FIRST_REQUEST = 3;
const SHARED = 1 << 15;

/** What a page is used for: `code` without the mark of several holders. */
export const codeOf = (value) => value & (SHARED - 1);
export const isShared = (value) => (value & SHARED) !== 0;

/** The index in `requests` of who holds a page with this code; negative where there is none. */
export const requestIndex = (code) => code - FIRST_REQUEST;
export const codeOfRequest = (index) => index + FIRST_REQUEST;

/** The pool of one stage class: whose each slab is, and what its pages are used for. */
class Pool {
  constructor(owners, groups) {
    this.owners = owners; // Int16Array [slabs]
    this.groups = groups; // group -> {codes: Uint16Array, perSlab}
    this.starts = new Int32Array(owners.length); // where a slab's codes begin
    const next = new Map([...groups.keys()].map((group) => [group, 0]));
    for (let slab = 0; slab < owners.length; slab += 1) {
      const group = owners[slab];
      if (group === NOBODY) continue;
      this.starts[slab] = next.get(group);
      next.set(group, this.starts[slab] + groups.get(group).perSlab);
    }
  }

  /** The codes of a slab's pages; none of a slab that nobody has. */
  pages(slab) {
    const group = this.groups.get(this.owners[slab]);
    return group ? group.codes.subarray(this.starts[slab], this.starts[slab] + group.perSlab) : new Uint16Array(0);
  }

  /** group -> how many slabs it has, and pages that are in use, cached and free in them. */
  counts() {
    const found = new Map();
    for (const [group, { codes, perSlab }] of this.groups) {
      const pages = { slabs: codes.length / perSlab, used: 0, cached: 0, free: 0 };
      for (const value of codes) {
        if (value === NOTHING) pages.free += 1;
        else if (value === CACHED) pages.cached += 1;
        else pages.used += 1;
      }
      found.set(group, pages);
    }
    return found;
  }
}

/** Read a snapshot: {head, requests, pools}. */
export function readSnapshot(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  let offset = 4 + length;
  const take = (Kind, size) => {
    const array = new Kind(buffer, offset, size);
    offset += array.byteLength;
    return array;
  };
  const pools = head.classes.map(({ num_slabs, groups }) => {
    const owners = take(Int16Array, num_slabs);
    const read = groups.map(({ group, num_slabs: slabs, pages_per_slab: perSlab }) => [
      group,
      { codes: take(Uint16Array, slabs * perSlab), perSlab },
    ]);
    return new Pool(owners, new Map(read));
  });
  const requests = head.requests.map(([id, prompt, output, computed, cached]) => ({
    id, prompt, output, computed, cached,
  }));
  return { head, requests, pools };
}
