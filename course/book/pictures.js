// The engine's player, on a recorded run. `player.js` is there where a page has one.
"use strict";

for (const element of document.querySelectorAll(".recorded")) {
  const { setup, frames, first } = JSON.parse(element.querySelector("script").textContent);
  element.hidden = false;
  const player = new Player(element.querySelector("div"), setup);
  for (const frame of frames) player.add(frame);
  player.seek(first);
  element.player = player; // for who looks at it from outside
}
