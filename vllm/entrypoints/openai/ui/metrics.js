'use strict';
// What /metrics says, as numbers.

// {name: [{labels, value}]} of Prometheus' text format.
function parseMetrics(text) {
  const found = {};
  for (const line of text.split('\n')) {
    const match = /^([\w:]+)(?:\{(.*)\})? (\S+)/.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] ?? '').matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) {
      labels[name] = value.replace(/\\(.)/g, (_, escaped) => escaped === 'n' ? '\n' : escaped);
    }
    (found[match[1]] ??= []).push({labels, value: Number(match[3])});
  }
  return found;
}

const sumOf = (metrics, name) => (metrics[`vllm:${name}`] ?? []).reduce((sum, {value}) => sum + value, 0);
const mostOf = (metrics, name) => Math.max(0, ...(metrics[`vllm:${name}`] ?? []).map(({value}) => value));

// Of a histogram, all engines together: counts up to each bound, [bound, count], sorted.
function bucketsOf(metrics, name) {
  const counts = new Map();
  for (const {labels, value} of metrics[`vllm:${name}_bucket`] ?? []) {
    const bound = labels.le === '+Inf' ? Infinity : Number(labels.le);
    counts.set(bound, (counts.get(bound) ?? 0) + value);
  }
  return [...counts].sort(([a], [b]) => a - b);
}

// The quantile of what was counted between two readings; null where that is nothing. Within a
// bucket values are taken as evenly spread, and above the last bound as the bound.
function quantile(before, after, share) {
  const earlier = new Map(before);
  const counts = after.map(([bound, count]) => [bound, count - (earlier.get(bound) ?? 0)]);
  const total = counts.at(-1)?.[1] ?? 0;
  if (total <= 0) return null;
  const wanted = share * total;
  let [low, below] = [0, 0];
  for (const [bound, count] of counts) {
    if (count >= wanted) {
      if (bound === Infinity || count === below) return low;
      return low + (bound - low) * (wanted - below) / (count - below);
    }
    [low, below] = [bound, count];
  }
  return low;
}

// What is kept of one reading. at: milliseconds of this page's clock.
function sampleOf(metrics, at) {
  return {
    at,
    running: sumOf(metrics, 'num_requests_running'),
    waiting: sumOf(metrics, 'num_requests_waiting'),
    cache: mostOf(metrics, 'kv_cache_usage_perc'),
    generated: sumOf(metrics, 'generation_tokens_total'),
    prompts: sumOf(metrics, 'prompt_tokens_total'),
    cached: sumOf(metrics, 'prompt_tokens_cached_total'),
    finished: sumOf(metrics, 'request_success_total'),
    preempted: sumOf(metrics, 'num_preemptions_total'),
    queue: bucketsOf(metrics, 'request_queue_time_seconds'),
    first: bucketsOf(metrics, 'time_to_first_token_seconds'),
    between: bucketsOf(metrics, 'inter_token_latency_seconds'),
  };
}
