/** One rank with two sequences, as the padded matrices of the original: the second also needs the first one's keys and values. */
export const padded = {
  seqLen: [[4, 4]],
  numSeqs: [2],
  qDispatch: [[0, 0]],
  kvToQMapping: [
    [
      [
        [0, 0],
        [0, 1],
      ],
      [
        [0, 1],
        [-1, -1],
      ],
    ],
  ],
  kvToQRank: [
    [
      [0, 0],
      [1, -1],
    ],
  ],
  kvContextSize: [[0, 4]],
  qToNumKvSeq: [[1, 2]],
  qToNumKvToken: [[4, 8]],
};
