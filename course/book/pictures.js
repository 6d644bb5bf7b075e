// The engine's player, on a recorded run. `player.js` is there where a page has one.
"use strict";

for (const place of document.querySelectorAll(".recorded")) {
  const { setup, frames, first } = JSON.parse(place.querySelector("script").textContent);
  place.hidden = false;
  const player = new Player(place.querySelector("div"), setup);
  for (const frame of frames) player.add(frame);
  player.seek(first);
  place.player = player; // for who looks at it from outside
}
