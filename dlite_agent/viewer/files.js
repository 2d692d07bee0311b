// Session files by drag and drop or by the file dialog: read here, understood by the server.

import { Problem, post } from "./api.js";
import { $ } from "./dom.js";

const MOST = 16 * 1024 * 1024;

/** `on` has reading(name), opened(refs) and failed(problem). */
export function acceptFiles(on) {
  let depth = 0;
  const carries = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
  window.addEventListener("dragenter", (event) => {
    if (!carries(event)) return;
    event.preventDefault();
    depth += 1;
    $("drop").hidden = false;
  });
  window.addEventListener("dragover", (event) => carries(event) && event.preventDefault());
  window.addEventListener("dragleave", () => {
    depth = Math.max(0, depth - 1);
    if (depth === 0) $("drop").hidden = true;
  });
  window.addEventListener("drop", (event) => {
    if (!carries(event)) return;
    event.preventDefault();
    depth = 0;
    $("drop").hidden = true;
    take([...event.dataTransfer.files], on);
  });
  $("open").addEventListener("change", () => {
    take([...$("open").files], on);
    $("open").value = "";
  });
}

async function take(files, on) {
  const refs = [];
  for (const file of files) {
    on.reading(file.name);
    try {
      if (file.size > MOST) throw new Problem(413, `${file.name} is larger than 16 MiB; cut it, or use \`dlite-agent report\`.`);
      const answer = await post("files", { name: file.name, text: await file.text() });
      refs.push(...answer.sessions);
    } catch (error) {
      on.failed(new Problem(error.status ?? 0, `${file.name}: ${error.message}`));
      return;
    }
  }
  if (refs.length) on.opened(refs);
}
