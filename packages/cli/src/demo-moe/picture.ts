/** The load of each rank and of each expert, before and after balancing, as SVG text. */
import type { TopLevelSpec } from 'vega-lite';
import type { MoeDemoReport } from './report.js';

export interface MoePicture extends Pick<MoeDemoReport, 'load'> {
  readonly title: string;
}

const before = '#e8853a';
const after = '#2f6fb5';
const ink = '#1f2933';

function specOf({ title, load: { experts: loads, spread, balanced } }: MoePicture): TopLevelSpec {
  const ranks = [
    ...Array.from(spread, (load, rank) => ({ rank: `${rank}`, placed: 'in order', load })),
    ...Array.from(balanced, (load, rank) => ({ rank: `${rank}`, placed: 'balanced', load })),
  ];
  const experts = loads.flatMap(({ expert, choices, replicas }) => [
    { expert: `${expert}`, placed: 'in order', load: choices },
    { expert: `${expert}`, placed: 'balanced', load: choices / replicas },
  ]);
  const placed = {
    field: 'placed',
    type: 'nominal',
    title: 'experts placed',
    scale: { domain: ['in order', 'balanced'], range: [before, after] },
  } as const;
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
          color: placed,
        },
      },
      {
        title: { text: 'choices of each expert, and of each of its replicas', color: ink },
        width: 560,
        height: 260,
        data: { values: experts },
        mark: 'bar',
        encoding: {
          x: { field: 'expert', type: 'ordinal', sort: null, axis: { labelAngle: 0, labelFontSize: 8 } },
          xOffset: { field: 'placed', sort: ['in order', 'balanced'] },
          y: { field: 'load', type: 'quantitative', title: 'choices' },
          color: placed,
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
