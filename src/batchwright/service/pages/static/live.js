// Keeps pages up to date. Without it every page works, and is as new as its last loading.
//
//   [data-live=URL]       fetched again and again; its [data-part] are changed where they differ
//   [data-answer=URL]     a form whose fields are sent to URL as they change; the answer goes into
//                         the element that data-into names
//   time[data-ago]        shown as "12 s ago"
//
// What changes is changed in place, node by node: focus, selection, open details, what was typed
// and how far a table was scrolled stay as they are.
"use strict";

(() => {
  const EVERY = 800; // ms between an answer and the next question
  const HIDDEN = 15000; // ms, while the page is hidden
  const SLOWEST = 10000; // after failures
  const SPOKEN = 5000; // ms between two sentences for a screen reader

  const PATIENCE = 60000; // for the answer to a form

  // An HTTP status that is no success, in words for the reader.
  function refusal(status) {
    if (status === 401 || status === 403) {
      return "This browser is no longer signed in: load the page again";
    }
    if (status === 404) return "This is no longer there: it was deleted";
    if (status === 429) return "The server has too much to do";
    return "The server cannot answer just now";
  }

  // ------------------------------------------------------------------------------- in place

  function change(from, to) {
    if (from.isEqualNode(to)) return;
    changeAttributes(from, to);
    if (from.matches("time[data-ago]")) return; // the clock below writes into it
    changeChildren(from, to);
  }

  function changeAttributes(from, to) {
    const own = from.nodeName === "DETAILS" ? "open" : null; // the reader's, not the server's
    for (const { name } of [...from.attributes]) {
      if (name !== own && !to.hasAttribute(name)) from.removeAttribute(name);
    }
    for (const { name, value } of to.attributes) {
      if (name !== own && from.getAttribute(name) !== value) from.setAttribute(name, value);
    }
  }

  // What tells a node from its siblings: its kind, and its key if it has one.
  function labelOf(node) {
    const key = node.nodeType === Node.ELEMENT_NODE ? node.getAttribute("data-key") : null;
    return key ? `${node.nodeName} ${key}` : node.nodeName;
  }

  // A node that stays is found again behind those that have gone, and is never moved for them: a
  // moved element loses the focus.
  function changeChildren(from, to) {
    const surplus = new Map(); // by label: how many more are left here than are wanted yet
    const add = (node, count) => {
      const label = labelOf(node);
      surplus.set(label, (surplus.get(label) ?? 0) + count);
    };
    const hasGone = (node) => node.nodeType === Node.TEXT_NODE || surplus.get(labelOf(node)) > 0;
    const keyed = new Map();
    for (const child of from.childNodes) add(child, 1);
    for (const child of to.childNodes) add(child, -1);
    for (const child of from.children) {
      if (child.hasAttribute("data-key")) keyed.set(labelOf(child), child);
    }
    let at = from.firstChild;
    for (const wanted of [...to.childNodes]) {
      const label = labelOf(wanted);
      let known = at;
      while (known && labelOf(known) !== label && hasGone(known)) known = known.nextSibling;
      if (known && labelOf(known) === label) {
        for (; at !== known; at = removed(at)) add(at, -1);
        at = at.nextSibling;
      } else if (keyed.has(label)) {
        known = keyed.get(label);
        from.insertBefore(known, at);
      } else {
        from.insertBefore(document.importNode(wanted, true), at);
        add(wanted, 1);
        continue;
      }
      if (known.nodeType === Node.ELEMENT_NODE) change(known, wanted);
      else if (known.nodeValue !== wanted.nodeValue) known.nodeValue = wanted.nodeValue;
    }
    while (at) at = removed(at);
  }

  // Removes a node; returns the one behind it.
  function removed(node) {
    const next = node.nextSibling;
    node.remove();
    return next;
  }

  // --------------------------------------------------------------------------------- spoken

  const speaker = document.querySelector("[data-speaker]");
  let spoken = -SPOKEN;
  let waiting = 0;

  function say(words) {
    if (!speaker || !words) return;
    clearTimeout(waiting); // what waits is out of date
    if (speaker.textContent === words) return;
    const rest = spoken + SPOKEN - performance.now(); // the clock may be set back
    if (rest > 0) {
      waiting = setTimeout(say, rest, words);
      return;
    }
    spoken = performance.now();
    speaker.textContent = words;
  }

  // ----------------------------------------------------------------------------------- live

  class Live {
    constructor(element) {
      this.element = element;
      this.etag = null;
      this.failures = 0;
      this.lost = element.querySelector("[data-lost]");
      this.since = ""; // when it was lost
      this.says = element.dataset.says;
      this.timer = 0;
      this.busy = false;
      this.over = element.hasAttribute("data-over");
      if (!this.over) this.wait();
      document.addEventListener("visibilitychange", () => {
        if (!document.hidden && !this.over && !this.busy) this.wait(0);
      });
    }

    wait(time) {
      clearTimeout(this.timer);
      const slow = Math.min(SLOWEST, EVERY * 2 ** this.failures);
      const pause = time ?? (document.hidden ? HIDDEN : slow);
      this.timer = setTimeout(() => this.ask(), pause);
    }

    parts() {
      return [...this.element.querySelectorAll("[data-part]")];
    }

    async ask() {
      this.busy = true;
      try {
        const url = new URL(this.element.dataset.live, location.href);
        const have = this.parts().map((one) => `${one.dataset.part}.${one.dataset.version}`);
        url.searchParams.set("have", have.join("~"));
        const headers = this.etag ? { "If-None-Match": this.etag } : {};
        const answer = await fetch(url, {
          headers,
          cache: "no-store",
          credentials: "same-origin",
          redirect: "error",
          signal: AbortSignal.timeout(15000),
        });
        await this.take(answer);
      } catch {
        this.fail("The server is not reached");
      }
      this.busy = false;
      if (!this.over) this.wait();
    }

    async take(answer) {
      if (answer.status === 200) {
        this.show(await answer.text());
        this.etag = answer.headers.get("ETag");
        this.reached();
      } else if (answer.status === 304) {
        this.reached();
      } else {
        this.fail(refusal(answer.status));
        this.over = [401, 403, 404].includes(answer.status);
      }
    }

    show(text) {
      const told = new DOMParser().parseFromString(text, "text/html").body.firstElementChild;
      const known = new Map(this.parts().map((one) => [one.dataset.part, one]));
      let before = null;
      for (const part of told.querySelectorAll("[data-part]")) {
        const old = known.get(part.dataset.part);
        known.delete(part.dataset.part);
        if (!old) {
          const fresh = document.importNode(part, true);
          if (before) before.after(fresh);
          else this.element.querySelector("[data-parts]").prepend(fresh);
          before = fresh;
          continue;
        }
        if (old.dataset.version !== part.dataset.version) change(old, part);
        before = old;
      }
      for (const gone of known.values()) gone.remove();
      if (told.dataset.says !== this.says) {
        this.says = told.dataset.says;
        say(this.says);
      }
      if (told.dataset.title) document.title = told.dataset.title;
      this.over = told.hasAttribute("data-over");
      tellTimes();
    }

    reached() {
      if (this.failures && this.lost) {
        this.lost.hidden = true;
        say("The server is reached again.");
      }
      this.failures = 0;
    }

    fail(words) {
      this.failures = Math.min(this.failures + 1, 6);
      if (!this.lost) return;
      if (this.lost.hidden) this.since = new Date().toLocaleTimeString();
      const text = `${words}. What you see is of ${this.since}.`;
      if (this.lost.textContent !== text) this.lost.textContent = text; // it is read out
      this.lost.hidden = false;
    }
  }

  // --------------------------------------------------------------------------------- answer

  class Answer {
    constructor(form) {
      this.form = form;
      this.into = document.getElementById(form.dataset.into);
      this.timer = 0;
      this.question = null; // the newest one
      form.addEventListener("input", (event) => {
        if (event.target.type === "file") return;
        clearTimeout(this.timer);
        this.timer = setTimeout(() => this.ask(), 250);
      });
      form.addEventListener("submit", (event) => {
        event.preventDefault();
        clearTimeout(this.timer);
        this.ask();
      });
    }

    async ask() {
      this.question?.abort(); // nobody waits for its answer any more
      const question = (this.question = new AbortController());
      const late = setTimeout(() => question.abort(), PATIENCE);
      const fields = new URLSearchParams();
      for (const [name, value] of new FormData(this.form)) if (value) fields.append(name, value);
      this.into.setAttribute("aria-busy", "true");
      let told = null;
      let wrong = "The server is not reached";
      try {
        const answer = await fetch(`${this.form.dataset.answer}?${fields}`, {
          cache: "no-store",
          credentials: "same-origin",
          redirect: "error",
          signal: question.signal,
        });
        if (answer.ok) {
          told = new DOMParser().parseFromString(await answer.text(), "text/html").body;
        } else {
          wrong = refusal(answer.status);
        }
        if (answer.status === 429) this.askAgain(question, answer.headers.get("Retry-After"));
      } catch {
        // not reached
      }
      clearTimeout(late);
      if (question !== this.question) return; // a newer question is on its way
      this.into.removeAttribute("aria-busy");
      const fresh = told?.querySelector("[data-answered]");
      if (!fresh) {
        this.fail(wrong);
        return;
      }
      changeChildren(this.into, fresh);
      this.complain(told);
      history.replaceState(null, "", `${this.form.getAttribute("action")}?${fields}`);
      say(fresh.dataset.says);
    }

    askAgain(question, seconds) {
      if (question !== this.question) return;
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.ask(), 1000 * Math.min(10, Number(seconds) || 1));
    }

    fail(words) {
      say(`${words}.`);
      const lost = this.into.querySelector("[data-lost]");
      if (!lost) return;
      lost.textContent = `${words}. What you see is the answer to an earlier question.`;
      lost.hidden = false;
    }

    complain(told) {
      const wrong = new Map();
      for (const one of told.querySelectorAll("[data-wrong]")) wrong.set(one.dataset.wrong, one);
      for (const place of this.form.querySelectorAll("[data-error-of]")) {
        const words = wrong.get(place.dataset.errorOf);
        changeChildren(place, words ?? new DocumentFragment());
        place.hidden = !words;
        const field = this.form.elements.namedItem(place.dataset.errorOf);
        if (!(field instanceof Element)) continue;
        if (words) field.setAttribute("aria-invalid", "true");
        else field.removeAttribute("aria-invalid");
      }
    }
  }

  // ---------------------------------------------------------------------------------- times

  function ago(seconds) {
    if (seconds < 5) return "just now";
    if (seconds < 60) return `${Math.floor(seconds)} s ago`;
    if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
    if (seconds < 48 * 3600) return `${Math.floor(seconds / 3600)} h ago`;
    return `${Math.floor(seconds / 86400)} days ago`;
  }

  function tellTimes() {
    for (const one of document.querySelectorAll("time[data-ago]")) {
      const at = new Date(one.dateTime);
      const words = ago(Math.max(0, (Date.now() - at) / 1000));
      if (one.textContent !== words) one.textContent = words;
      const title = at.toLocaleString();
      if (one.title !== title) one.title = title;
    }
  }

  // ------------------------------------------------------------------------- folded sections

  function unfold() {
    const part = document.getElementById(location.hash.slice(1));
    const folded = part?.querySelector(":scope > details.folded");
    if (folded) folded.open = true;
  }

  addEventListener("hashchange", unfold);
  unfold();
  for (const element of document.querySelectorAll("[data-live]")) new Live(element);
  for (const form of document.querySelectorAll("form[data-answer]")) new Answer(form);
  tellTimes();
  setInterval(tellTimes, 1000);
})();
