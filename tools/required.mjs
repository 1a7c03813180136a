/**
 * True if EP_REQUIRE, a list with commas, names it: that it is unavailable is a failure then.
 * @param {string} name
 * @param {NodeJS.ProcessEnv} [env]
 */
export const isRequired = (name, env = process.env) =>
  (env.EP_REQUIRE ?? '').split(',').some((one) => one.trim() === name);
