// The tabs of the detail column.

import { $ } from "./dom.js";

export class Tabs {
  constructor(names) {
    this.names = names;
    this.current = names[0];
    for (const name of names) {
      const tab = $(`tab-${name}`);
      tab.addEventListener("click", () => this.show(name));
      tab.addEventListener("keydown", (event) => {
        const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (!by) return;
        event.preventDefault();
        event.stopPropagation();
        const open = this.names.filter((item) => !$(`tab-${item}`).hidden);
        const next = open[(open.indexOf(name) + by + open.length) % open.length];
        this.show(next);
        $(`tab-${next}`).focus();
      });
    }
  }

  show(name) {
    this.current = name;
    for (const item of this.names) {
      const chosen = item === name;
      $(item).hidden = !chosen;
      $(`tab-${item}`).setAttribute("aria-selected", String(chosen));
      $(`tab-${item}`).tabIndex = chosen ? 0 : -1;
    }
  }

  /** Offers a tab or takes it away; one that is taken away while it is shown gives way to the first. */
  offer(name, there) {
    $(`tab-${name}`).hidden = !there;
    if (!there && this.current === name) this.show(this.names[0]);
  }
}
