// Sliders that move a cut through a real distribution. Without this file the pictures stay as drawn.
"use strict";

{
  for (const dial of document.querySelectorAll(".dial")) {
    const sliders = [...dial.querySelectorAll("input")];
    const rows = [...dial.querySelectorAll("tr")];

    function draw() {
      const { logits, tokens } = JSON.parse(dial.querySelector("script").textContent);
      const given = { temperature: 1, k: 0, p: 1 };
      for (const slider of sliders) {
        given[slider.name] = Number(slider.value);
        slider.nextElementSibling.textContent = slider.value === slider.dataset.off ? "off" : slider.value;
      }
      const probs = samplingProbs(logits, given);
      const rest = probs.slice(tokens.length).reduce((sum, p) => sum + p, 0);
      [...probs.slice(0, tokens.length), rest].forEach((p, index) => {
        rows[index].querySelector(".bar").style.width = `${100 * p}%`;
        rows[index].querySelector(".value").textContent = percent(p);
        rows[index].classList.toggle("cut", p === 0);
      });
      const kept = probs.filter((p) => p > 0).length;
      const most = `the most likely one has ${percent(probs[0])}`;
      dial.querySelector(".note").textContent =
        `${kept.toLocaleString("en")} of ${logits.length.toLocaleString("en")} tokens can be drawn; ${most}.`;
    }

    dial.addEventListener("input", draw);
    dial.hidden = false;
    draw();
  }

  // `sampling_probs` of sampling.py, for logits in falling order.
  function samplingProbs(logits, { temperature, k, p }) {
    const scaled = logits.map((logit) => (logit - logits[0]) / temperature); // lesson 05
    const least = k > 0 ? scaled[Math.min(k, scaled.length) - 1] : -Infinity; // lesson 06
    let probs = softmax(scaled.map((value) => (value >= least ? value : -Infinity)));
    if (p < 1) {
      let mass = 0;
      probs = probs.map((own, index) => {
        const stays = index === 0 || mass < p; // lesson 07: the mass before it
        mass += own;
        return stays ? own : 0;
      });
    }
    const sum = probs.reduce((total, own) => total + own, 0);
    return probs.map((own) => own / sum);
  }

  function softmax(values) {
    const powers = values.map(Math.exp);
    const sum = powers.reduce((total, power) => total + power, 0);
    return powers.map((power) => power / sum);
  }

  function percent(p) {
    const digits = p === 1 || (p >= 0.0995 && p < 0.995) ? 0 : 1;
    return `${(100 * p).toFixed(digits)}\u00a0%`;
  }
}

// The engine's player, on a recorded run. `player.js` is there where a page has one.
for (const place of document.querySelectorAll(".recorded")) {
  const { setup, frames, first } = JSON.parse(place.querySelector("script").textContent);
  place.hidden = false;
  const player = new Player(place.querySelector("div"), setup);
  for (const frame of frames) player.add(frame);
  player.seek(first);
  place.player = player; // for who looks at it from outside
}
