/** The load of each rank and of each expert, before and after balancing, as SVG text. */
import type { TopLevelSpec } from 'vega-lite';

export interface MoePicture {
  readonly title: string;
  /** Choices of each expert. */
  readonly expertLoad: Float64Array;
  readonly spread: Float64Array;
  readonly balanced: Float64Array;
}

const before = '#e8853a';
const after = '#2f6fb5';
const ink = '#1f2933';

function specOf({ title, expertLoad, spread, balanced }: MoePicture): TopLevelSpec {
  const ranks = [
    ...Array.from(spread, (load, rank) => ({ rank: `${rank}`, placed: 'in order', load })),
    ...Array.from(balanced, (load, rank) => ({ rank: `${rank}`, placed: 'balanced', load })),
  ];
  const experts = Array.from(expertLoad, (load, expert) => ({ expert, load }));
  return {
    title: { text: title, color: ink },
    background: '#ffffff',
    hconcat: [
      {
        title: { text: 'rows of each rank', color: ink },
        width: 360,
        height: 260,
        data: { values: ranks },
        mark: 'bar',
        encoding: {
          x: { field: 'rank', type: 'ordinal', axis: { labelAngle: 0 }, sort: null },
          xOffset: { field: 'placed', sort: ['in order', 'balanced'] },
          y: { field: 'load', type: 'quantitative', title: 'rows' },
          color: {
            field: 'placed',
            type: 'nominal',
            title: 'experts placed',
            scale: { domain: ['in order', 'balanced'], range: [before, after] },
          },
        },
      },
      {
        title: { text: 'choices of each expert, most chosen first', color: ink },
        width: 360,
        height: 260,
        data: { values: experts },
        mark: { type: 'bar', color: before },
        encoding: {
          x: { field: 'expert', type: 'ordinal', sort: '-y', axis: { labels: false, ticks: false } },
          y: { field: 'load', type: 'quantitative', title: 'choices' },
        },
      },
    ],
  };
}

/** Loads the drawing libraries at the first call: no other command pays for them. */
export async function drawMoe(picture: MoePicture): Promise<string> {
  const [vega, vegaLite] = await Promise.all([import('vega'), import('vega-lite')]);
  const view = new vega.View(vega.parse(vegaLite.compile(specOf(picture)).spec), { renderer: 'none' });
  try {
    return await view.toSVG();
  } finally {
    view.finalize();
  }
}
