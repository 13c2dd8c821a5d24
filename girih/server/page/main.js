// The page: asks twice a second what the engine shows, and lets every part show it.

import { ask } from "./api.js";
import { Chat } from "./chat.js";
import { isDark } from "./colors.js";
import { byId, element } from "./dom.js";
import { Inspector } from "./inspector.js";
import { MemoryMap } from "./map.js";
import { Requests, showLegend, showPlan } from "./panels.js";
import { readSnapshot } from "./snapshot.js";
import { Tiles } from "./tiles.js";

const EVERY_MS = 500;
const AFTER_ERROR_MS = 2000;

const inspector = new Inspector(byId("inspector"), byId("held"));
const map = new MemoryMap(byId("map"), byId("map-scale"), (place) => inspector.show(place, map.pool, plan));
const requests = new Requests((id) => map.set({ lit: id }));
const tiles = new Tiles();
const chat = new Chat();
let plan = null;
let planOfRestart = null;
let isPaused = false;
let timer = null;

async function look() {
  timer = null;
  if (isPaused || document.hidden) return;
  let wait = EVERY_MS;
  try {
    const snapshot = readSnapshot(await (await ask("/dashboard/state")).arrayBuffer());
    if (planOfRestart !== snapshot.head.num_restarts) await readPlan(snapshot.head.num_restarts);
    if (!isPaused) show(snapshot);
  } catch (error) {
    say("failed", error.message);
    wait = AFTER_ERROR_MS;
  }
  if (!isPaused) timer ??= setTimeout(look, wait);
}

async function readPlan(restart) {
  plan = await (await ask("/dashboard/plan")).json();
  planOfRestart = restart;
  byId("model").textContent = plan.model;
  document.title = `${plan.model}: Girih's live memory map`;
  chat.setPlan(plan);
}

function show(snapshot) {
  say("live", "live");
  tiles.show(snapshot, plan);
  map.show(snapshot);
  requests.show(snapshot.requests);
  showPools(snapshot.pools);
  showStill();
}

/** Show what depends on colours and choices, not on time. */
function showStill() {
  if (!map.snapshot) return;
  showPlan(plan, map.snapshot.pools);
  if (map.pool) showLegend(map.pool, map.mode);
}

function showPools(pools) {
  const box = byId("pools");
  box.hidden = pools.length < 2;
  if (box.childElementCount !== pools.length) {
    const buttons = pools.map((_, i) => {
      const button = element("button", { type: "button" }, `Pool ${i}`);
      button.addEventListener("click", () => choosePool(i));
      return button;
    });
    box.replaceChildren(...buttons);
    choosePool(map.poolIndex);
  }
}

function choosePool(index) {
  map.set({ poolIndex: index });
  [...byId("pools").children].forEach((button, i) => button.setAttribute("aria-pressed", String(i === index)));
  showStill();
}

function chooseMode(mode) {
  byId("by-group").setAttribute("aria-pressed", String(mode === "group"));
  byId("by-request").setAttribute("aria-pressed", String(mode === "request"));
  map.set({ mode });
  showStill();
}

function say(state, text) {
  const status = byId("status");
  status.dataset.state = state;
  if (status.textContent !== text) status.textContent = text;
}

function setPaused(value) {
  isPaused = value;
  byId("pause").setAttribute("aria-pressed", String(value));
  byId("pause").textContent = value ? "Resume" : "Pause";
  if (value) {
    clearTimeout(timer);
    timer = null;
    say("paused", "paused");
  } else {
    begin();
  }
}

function begin() {
  if (!isPaused) timer ??= setTimeout(look, 0);
}

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  byId("theme").textContent = isDark() ? "Light" : "Dark";
  map.draw();
  showStill();
}

function storedTheme() {
  const theme = localStorage.getItem("girih-theme");
  return theme === "light" || theme === "dark" ? theme : null;
}

byId("by-group").addEventListener("click", () => chooseMode("group"));
byId("by-request").addEventListener("click", () => chooseMode("request"));
byId("zoom-in").addEventListener("click", () => map.zoomBy(1));
byId("zoom-out").addEventListener("click", () => map.zoomBy(-1));
byId("pause").addEventListener("click", () => setPaused(!isPaused));
byId("theme").addEventListener("click", () => {
  const theme = isDark() ? "light" : "dark";
  localStorage.setItem("girih-theme", theme);
  setTheme(theme);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme(null));
document.addEventListener("visibilitychange", begin);
setTheme(storedTheme());
begin();
