/**
 * What a call is refused with: its code, or the text of an error that has none.
 * @param {() => unknown} body
 * @returns {Promise<string>}
 */
export async function codeOf(body) {
  try {
    await body();
    return 'no error';
  } catch (error) {
    return /** @type {{ code?: string }} */ (error).code ?? String(error);
  }
}
