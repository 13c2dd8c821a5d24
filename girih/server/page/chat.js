// A box to try the model: a conversation that is streamed, or a plain completion where there is no chat template.

import { ask, events, setKey } from "./api.js";
import { byId, element, plural } from "./dom.js";

export class Chat {
  constructor() {
    this.log = byId("chat-log");
    this.text = byId("chat-text");
    this.messages = [];
    this.running = null; // an AbortController
    this.plan = null;
    byId("chat").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.text.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    byId("chat-stop").addEventListener("click", () => this.running?.abort());
    byId("chat-clear").addEventListener("click", () => this.clear());
    byId("key").addEventListener("input", (event) => setKey(event.target.value.trim()));
  }

  /** Learn what the model can do. */
  setPlan(plan) {
    this.plan = plan;
    byId("key-field").hidden = !plan.needs_key;
    if (!plan.has_chat_template) this.text.placeholder = "Begin a text; the model goes on";
  }

  clear() {
    this.running?.abort();
    this.messages = [];
    this.log.replaceChildren();
    this.text.focus();
  }

  async send() {
    const text = this.text.value;
    if (!text.trim() || this.running || !this.plan) return;
    const messages = this.messages; // of this conversation, even if another one is begun
    this.text.value = "";
    messages.push({ role: "user", content: text });
    this.say("user", text);
    const bubble = this.say("assistant", "");
    const running = (this.running = new AbortController());
    this.showRunning(true);
    let answer = "";
    let note = "";
    try {
      for await (const event of this.stream(messages, running.signal)) {
        const choice = event.choices[0];
        answer += choice?.delta?.content ?? choice?.text ?? "";
        bubble.textContent = answer;
        this.log.scrollTop = this.log.scrollHeight;
        if (event.usage) note = describe(event.usage);
      }
    } catch (error) {
      note = running.signal.aborted ? "stopped" : error.message;
      bubble.classList.toggle("failed", !running.signal.aborted);
      if (error.status === 401) byId("key-field").hidden = false;
    }
    if (answer) messages.push({ role: "assistant", content: answer });
    else messages.pop();
    bubble.after(element("p", { class: "note" }, note));
    this.log.scrollTop = this.log.scrollHeight;
    this.running = null;
    this.showRunning(false);
  }

  async *stream(messages, signal) {
    const { has_chat_template: hasTemplate, model } = this.plan;
    const what = hasTemplate ? { messages } : { prompt: messages.at(-1).content };
    const body = {
      ...what,
      model,
      stream: true,
      stream_options: { include_usage: true },
      max_tokens: Number(byId("chat-tokens").value) || 128,
      temperature: Number(byId("chat-temperature").value),
    };
    const path = hasTemplate ? "/v1/chat/completions" : "/v1/completions";
    yield* events(await ask(path, { body, signal }));
  }

  say(role, text) {
    const bubble = element("p", { class: `bubble ${role}` }, text);
    this.log.append(bubble);
    this.log.scrollTop = this.log.scrollHeight;
    return bubble;
  }

  showRunning(isRunning) {
    byId("chat-stop").hidden = !isRunning;
    byId("chat-send").hidden = isRunning;
  }
}

function describe(usage) {
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const prompt = `${plural(usage.prompt_tokens, "token")} of prompt, ${cached} of them cached`;
  return `${prompt}; ${plural(usage.completion_tokens, "token")} of answer`;
}
