// Throughput and failures over the last hour.

import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";

import { serviceTime } from "./api";
import { number, plural, rate } from "./format";
import type { History } from "./types";

const color = (name: string): string => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const HEIGHT = 150;
/** Seconds that are shown at least. */
const SHORTEST = 300;
/** From so many seconds on, a bar is a minute. */
const LONG = 900;

export function Throughput({ history, theme }: { history: History; theme: string }) {
  const host = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const done = history.completed.reduce((sum, each) => sum + each, 0);
  const failed = history.failed.reduce((sum, each) => sum + each, 0);
  const [, perSecond] = columns(history);
  const label = `In the time shown ${plural(done, "job")} completed and ${number(failed)} failed: ${rate(Math.max(...perSecond))} per second at most, ${rate(perSecond.at(-1))} at the end.`;

  useEffect(() => {
    const box = host.current;
    if (!box) return;
    const probe = document.createElement("span");
    box.append(probe);
    const shade = (name: string) => {
      probe.style.color = `var(${name})`;
      return getComputedStyle(probe).color;
    };
    const axis: uPlot.Axis = {
      stroke: shade("--quiet"),
      grid: { stroke: shade("--line"), width: 1 },
      ticks: { show: false },
      font: `11px ${color("--font") || "system-ui"}`,
    };
    const bars = uPlot.paths.bars?.({ size: [0.8, 24], gap: 1 });
    const made = new uPlot(
      {
        width: box.clientWidth || 600,
        height: HEIGHT,
        cursor: { y: false, points: { show: false } },
        legend: { show: false },
        scales: { x: { range: (_, least, most) => [Math.min(least, most - SHORTEST), most] }, y: { range: (_, __, most) => [0, Math.max(1, most * 1.15)] } },
        axes: [
          { ...axis, size: 26, space: 90, grid: { show: false }, values: (_, all) => all.map((at) => new Date(at * 1000).toLocaleTimeString(undefined, { hour: "2-digit", minute: "2-digit", hour12: false })) },
          { ...axis, size: 44, space: 36, values: (_, all) => all.map((each) => (Number.isInteger(each) ? number(each) : each.toFixed(1))) },
        ],
        series: [
          {},
          { label: "completed/s", stroke: shade("--done"), fill: shade("--done"), paths: bars, points: { show: false } },
          { label: "failed/s", stroke: shade("--bad"), fill: shade("--bad"), paths: bars, points: { show: false } },
        ],
      },
      drawn(history),
      box,
    );
    probe.remove();
    plot.current = made;
    const sized = new ResizeObserver(() => made.setSize({ width: box.clientWidth, height: HEIGHT }));
    sized.observe(box);
    return () => {
      sized.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [theme]);
  useEffect(() => plot.current?.setData(drawn(history)), [history]);
  return <div class="chart" ref={host} role="img" aria-label={label} />;
}

/** The columns without those that are empty: a bar without height would still have a line. */
function drawn(history: History): uPlot.AlignedData {
  const [at, done, bad] = columns(history);
  const bars = (rates: number[]) => rates.map((each) => each || null);
  return [at, bars(done), bars(bad)];
}

/** All that ended, with failed drawn in front of it: per second, in steps that are wide enough to see. A step counts for
 *  as long as it was observed: the last one has only begun, and nothing was read while the store was away. */
function columns(history: History): [number[], number[], number[]] {
  const span = (history.at.at(-1) ?? 0) - (history.at[0] ?? 0);
  const step = span > LONG ? 60 : history.interval;
  const at: number[] = [];
  const done: number[] = [];
  const bad: number[] = [];
  const observed: number[] = [];
  history.at.forEach((moment, n) => {
    const middle = Math.floor(moment / step) * step + step / 2;
    if (at.at(-1) !== middle) {
      at.push(middle);
      done.push(0);
      bad.push(0);
      observed.push(0);
    }
    const last = at.length - 1;
    done[last] += history.completed[n] + history.failed[n];
    bad[last] += history.failed[n];
    observed[last] += moment - (history.at[n - 1] ?? history.since ?? moment - history.interval);
  });
  const rates = (counts: number[]) => counts.map((count, n) => count / Math.max(1, observed[n]));
  if (at.length > 1) return [at, rates(done), rates(bad)];
  // A single moment makes no axis of times.
  const end = at[0] ?? serviceTime();
  return [[end - SHORTEST, end], [0, ...rates(done), 0].slice(0, 2), [0, ...rates(bad), 0].slice(0, 2)];
}

/** Counts over time as a small row of bars. */
export function Spark({ counts, label }: { counts: number[]; label: string }) {
  const most = Math.max(1, ...counts);
  const width = 100 / Math.max(1, counts.length);
  return (
    <svg class="spark" viewBox="0 0 100 20" preserveAspectRatio="none" role="img" aria-label={label}>
      {counts.map((count, n) => {
        const height = count ? Math.max(1.5, (count / most) * 20) : 0;
        return <rect key={n} x={n * width} y={20 - height} width={width * 0.8} height={height} />;
      })}
    </svg>
  );
}
