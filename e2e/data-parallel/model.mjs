/**
 * A perceptron of two layers in f32 and the samples it learns, all made from a seed: whoever computes something computes the same bits.
 */

/** Elements of every sample's input and target. */
const INPUTS = 32;
const OUTPUTS = 4;
/** Of the network that the targets come from. */
const TEACHER_HIDDEN = 16;
const SAMPLES = 4096;

const MOMENTUM = Math.fround(0.9);

/** 32 bits in which every bit depends on every bit of what came in. */
function mix(bits) {
  let mixed = Math.imul(bits ^ (bits >>> 16), 0x45d9f3b);
  mixed = Math.imul(mixed ^ (mixed >>> 16), 0x45d9f3b);
  return (mixed ^ (mixed >>> 16)) >>> 0;
}

/** A number from -1 to 1 that depends on the three integers only. */
const noise = (seed, row, column) => mix(mix(mix(seed) + row) + column) / 2 ** 31 - 1;

export class Model {
  /** Of all weights: first layer [hidden, INPUTS] and [hidden], second layer [hidden, OUTPUTS] and [OUTPUTS]. */
  static lengthOf(hidden) {
    return hidden * (INPUTS + 1) + (hidden + 1) * OUTPUTS;
  }

  constructor(hidden, seed) {
    this.hidden = hidden;
    this.weights = new Float32Array(Model.lengthOf(hidden));
    this.velocity = new Float32Array(this.weights.length);
    this.#activations = new Float32Array(hidden);
    this.#rate = 0.3 / hidden;
    const { first, second } = this.#layers(this.weights);
    for (let i = 0; i < first.length; i++) first[i] = noise(seed, 1, i) / Math.sqrt(INPUTS);
    for (let i = 0; i < second.length; i++) second[i] = noise(seed, 2, i) / Math.sqrt(hidden);
  }

  /** Writes the gradient of the summed loss of `samples` into `gradient` (as long as the weights). Returns that loss. */
  gradientOf(samples, gradient) {
    gradient.fill(0);
    const { second } = this.#layers(this.weights);
    const to = this.#layers(gradient);
    const activations = this.#activations;
    let loss = 0;
    for (const { input, target } of samples) {
      const errors = this.predict(input);
      for (let k = 0; k < OUTPUTS; k++) {
        errors[k] -= target[k];
        loss += errors[k] ** 2 / 2;
        to.secondBias[k] += errors[k];
      }
      for (let j = 0; j < this.hidden; j++) {
        if (activations[j] === 0) continue;
        let error = 0;
        for (let k = 0; k < OUTPUTS; k++) {
          error += errors[k] * second[j * OUTPUTS + k];
          to.second[j * OUTPUTS + k] += errors[k] * activations[j];
        }
        to.firstBias[j] += error;
        for (let i = 0; i < INPUTS; i++) to.first[j * INPUTS + i] += error * input[i];
      }
    }
    return loss;
  }

  /** One step of gradient descent with momentum. */
  descend(gradient) {
    const { weights, velocity } = this;
    for (let i = 0; i < weights.length; i++) {
      velocity[i] = MOMENTUM * velocity[i] + gradient[i];
      weights[i] -= this.#rate * velocity[i];
    }
  }

  predict(input) {
    const { first, firstBias, second, secondBias } = this.#layers(this.weights);
    const outputs = Float32Array.from(secondBias);
    for (let j = 0; j < this.hidden; j++) {
      let sum = firstBias[j];
      for (let i = 0; i < INPUTS; i++) sum += first[j * INPUTS + i] * input[i];
      const active = Math.max(sum, 0);
      this.#activations[j] = active;
      if (active > 0) for (let k = 0; k < OUTPUTS; k++) outputs[k] += active * second[j * OUTPUTS + k];
    }
    return outputs;
  }

  #activations;
  #rate;

  #layers(elements) {
    const { hidden } = this;
    const firstBias = hidden * INPUTS;
    const second = firstBias + hidden;
    const secondBias = second + hidden * OUTPUTS;
    return {
      first: elements.subarray(0, firstBias),
      firstBias: elements.subarray(firstBias, second),
      second: elements.subarray(second, secondBias),
      secondBias: elements.subarray(secondBias),
    };
  }
}

export class Samples {
  #teacher = new Model(TEACHER_HIDDEN, 7);
  #seed;

  constructor(seed) {
    this.#seed = seed;
  }

  /**
   * The schedule: which samples belong to a shard of a step. It says nothing of ranks. Every sample is used once before any is used again, in another order each
   * time (an odd multiplier permutes the numbers below a power of two).
   */
  of(step, shard, { shards, batch }) {
    return Array.from({ length: batch }, (_, i) => {
      const position = (step * shards + shard) * batch + i;
      const shift = mix(this.#seed + Math.floor(position / SAMPLES));
      return this.#sample((Math.imul(position, 1_566_083_941) + shift) & (SAMPLES - 1));
    });
  }

  #sample(index) {
    const input = Float32Array.from({ length: INPUTS }, (_, i) => Math.sqrt(3) * noise(this.#seed, index, i));
    return { input, target: this.#teacher.predict(input) };
  }
}
