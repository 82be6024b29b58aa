// A run as typed arrays: whole at first, then grown by what is newer.

class Growing {
  constructor(Kind) {
    this.Kind = Kind;
    this.room = new Kind(0);
    this.length = 0;
  }

  get values() { return this.room.subarray(0, this.length); }

  append(values) {
    const needed = this.length + values.length;
    if (needed > this.room.length) {
      const larger = new this.Kind(this.length ? Math.max(needed, 2 * this.room.length) : needed);
      larger.set(this.values);
      this.room = larger;
    }
    this.room.set(values, this.length);
    this.length = needed;
  }
}

// Spans of one lane, by time. Microseconds since the run's begin; state codes are places in `stateNames`.
class Lane {
  constructor(about) {
    Object.assign(this, { worker: about.worker, lane: about.lane, role: about.role, rank: about.rank, gpu: about.gpu });
    this.columns = {
      start: new Growing(Float64Array), end: new Growing(Float64Array), state: new Growing(Uint8Array),
      pack: new Growing(Int32Array), step: new Growing(Int32Array),
    };
  }

  get length() { return this.columns.start.length; }
  get start() { return this.columns.start.values; }
  get end() { return this.columns.end.values; }
  get state() { return this.columns.state.values; }
  get pack() { return this.columns.pack.values; }
  get step() { return this.columns.step.values; }

  async append(encoded, codes) {
    const names = ["state", "gap", "micros", "pack", "step"];
    const [state, gap, micros, pack, step] = await Promise.all(names.map((name) => decodeColumn(encoded[name])));
    const start = new Float64Array(encoded.n);
    const end = new Float64Array(encoded.n);
    for (let i = 0, at = 0; i < encoded.n; i++) {
      start[i] = at + gap[i];
      at = end[i] = start[i] + micros[i];
      state[i] = codes[encoded.states[state[i]]];
    }
    for (const [name, values] of Object.entries({ start, end, state, pack, step })) this.columns[name].append(values);
  }

  // Place of the first span that ends after a time.
  firstAfter(time) {
    const end = this.end;
    let low = 0;
    let high = end.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (end[middle] > time) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  // Place of the span that covers a time, or -1.
  at(time) {
    const place = this.firstAfter(time);
    return place < this.length && this.start[place] <= time ? place : -1;
  }
}

const withGaps = (values) => Array.from(values, (value) => (Number.isFinite(value) ? value : null));

class RunModel {
  constructor(states) {
    this.stateTable = states;
    this.stateNames = Object.keys(states);
    this.codes = Object.fromEntries(this.stateNames.map((name, code) => [name, code]));
    this.forget();
  }

  forget() {
    this.lanes = [];
    this.train = { step: [], columns: {} };
    this.queues = new Map();
    this.gpus = new Map();
  }

  async take(payload) {
    if (payload.whole) {
      this.forget();
      this.fixed = payload;
    }
    for (const name of ["cursor", "begin", "end", "now", "ended", "figures", "verdict", "validations", "events", "slot_accuracy"]) {
      this[name] = payload[name];
    }
    if (payload.whole) this.exact = payload.exact;
    for (const encoded of payload.lanes) await this.laneOf(encoded).append(encoded, this.codesFor(encoded.states));
    await this.takeTrain(payload.train);
    await this.takeSlots(payload.slot_curves);
    await this.takeSamples(this.queues, payload.queues, "rank");
    await this.takeSamples(this.gpus, payload.gpus, "gpu");
  }

  laneOf(about) {
    let lane = this.lanes.find((one) => one.worker === about.worker && one.lane === about.lane);
    if (!lane) this.lanes.push((lane = new Lane(about)));
    return lane;
  }

  // A state that the table does not know is shown like a stage of work, under its own name.
  codesFor(names) {
    for (const name of names) {
      if (name in this.codes) continue;
      this.codes[name] = this.stateNames.push(name) - 1;
      this.stateTable[name] = { kind: "work", sentence: "A state without a description.", light: "#44708f", dark: "#76a3c2" };
    }
    return this.codes;
  }

  async takeTrain(train) {
    const before = this.train.step.length;
    this.train.meanOf = Math.max(train.mean_of, before ? this.train.meanOf : 1);
    this.train.step = this.train.step.concat(Array.from(await decodeColumn(train.step)));
    const added = this.train.step.length - before;
    for (const name of new Set([...Object.keys(this.train.columns), ...Object.keys(train.columns)])) {
      const old = this.train.columns[name] || new Array(before).fill(null);
      const fresh = train.columns[name] ? withGaps(await decodeColumn(train.columns[name])) : new Array(added).fill(null);
      this.train.columns[name] = old.concat(fresh);
    }
  }

  async takeSlots(found) {
    const columns = [];
    for (const column of found.columns) columns.push(withGaps(await decodeColumn(column)));
    this.slots = { step: Array.from(await decodeColumn(found.step)), columns };
  }

  async takeSamples(held, found, key) {
    for (const part of found) {
      if (!held.has(part[key])) held.set(part[key], { time: [], columns: {} });
      const samples = held.get(part[key]);
      const before = samples.time.length;
      samples.time = samples.time.concat(withGaps(await decodeColumn(part.time)));
      const added = samples.time.length - before;
      for (const name of new Set([...Object.keys(samples.columns), ...Object.keys(part.columns)])) {
        const old = samples.columns[name] || new Array(before).fill(null);
        const fresh = part.columns[name] ? withGaps(await decodeColumn(part.columns[name])) : new Array(added).fill(null);
        samples.columns[name] = old.concat(fresh);
      }
    }
  }

  colour(code) { return this.stateTable[this.stateNames[code]][darkScheme.matches ? "dark" : "light"]; }

  // Microseconds in which a step was made, by the first lane that has its spans; null when none has.
  spanOfStep(step) {
    for (const lane of this.lanes) {
      if (lane.lane !== "cpu") continue;
      const first = lane.step.indexOf(step);
      if (first >= 0) return [lane.start[first], lane.end[lane.step.lastIndexOf(step)]];
    }
    return null;
  }
}
