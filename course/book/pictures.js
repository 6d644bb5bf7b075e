// Start player.js on each recorded run of the page. A page without one does not load player.js.
"use strict";

for (const element of document.querySelectorAll(".recorded")) {
  const { setup, frames, first } = JSON.parse(element.querySelector("script").textContent);
  element.hidden = false;
  const player = new Player(element.querySelector("div"), setup);
  for (const frame of frames) player.add(frame);
  player.seek(first);
  element.player = player; // for the checks of the book
}
