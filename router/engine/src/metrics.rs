//! Prometheus metrics, updated with atomics only.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use plait_core::{FinishReason, Refusal, Stats, StepWork};
use plait_openai::CallCounts;
use prometheus_client::encoding::text;
use prometheus_client::metrics::TypedMetric;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Metric, Registry};
use rustc_hash::FxHashMap;

use crate::grammar_metrics::GrammarMetrics;
use crate::histogram::Histogram;
use crate::loss_metrics::LossMetrics;
use crate::step_model_metrics::StepModelMetrics;

/// A metric with one label; each of its values is looked up once, at start-up.
type Labelled<M> = Family<[(&'static str, &'static str); 1], M>;

/// Every metric of one replica.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    /// Steps, as their results come in.
    pub steps: StepMetrics,
    /// Requests, from submit to their end.
    pub requests: RequestMetrics,
    /// The scheduler's counts.
    pub scheduler: SchedulerMetrics,
    /// What is expected of steps.
    pub step_model: StepModelMetrics,
    /// Latencies.
    pub latency: LatencyMetrics,
    /// Tokens of requests.
    pub sizes: SizeMetrics,
    /// The group's steps.
    pub group: GroupMetrics,
    /// Masks of constrained answers.
    pub masks: MaskMetrics,
    /// Losses of its ranks.
    pub losses: LossMetrics,
    /// Messages on the link that were dropped.
    pub num_malformed: Counter,
    /// Messages with KV events.
    pub num_kv_event_messages: Counter,
}

/// Which rows a step had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepKind {
    /// Prefill rows only.
    Prefill,
    /// Decode rows only.
    Decode,
    /// Both in one forward.
    Mixed,
}

impl StepKind {
    const LABELS: [&str; 3] = ["prefill", "decode", "mixed"];

    /// The kind of a plan with these rows; None without rows.
    pub fn of(has_prefill: bool, has_decode: bool) -> Option<Self> {
        match (has_prefill, has_decode) {
            (true, true) => Some(Self::Mixed),
            (true, false) => Some(Self::Prefill),
            (false, true) => Some(Self::Decode),
            (false, false) => None,
        }
    }
}

/// By [`StepKind`].
#[derive(Debug)]
pub struct StepMetrics {
    num_steps: [Counter; 3],
    seconds: [Histogram; 3],
    prefill_tokens: Counter,
    decode_tokens: Counter,
}

impl StepMetrics {
    fn register(registry: &mut Registry) -> Self {
        let num_steps = labelled(
            registry,
            "plait_steps",
            "Steps by the rows they had",
            "kind",
            StepKind::LABELS,
        );
        let tokens = labelled(
            registry,
            "plait_step_tokens",
            "Tokens computed",
            "phase",
            ["prefill", "decode"],
        );
        let [prefill_tokens, decode_tokens] = tokens;
        let family = Labelled::new_with_constructor(step_seconds as fn() -> Histogram);
        let seconds = StepKind::LABELS.map(|kind| family.get_or_create(&[("kind", kind)]).clone());
        registry.register("plait_step_seconds", "Time of a step on the worker", family);
        Self {
            num_steps,
            seconds,
            prefill_tokens,
            decode_tokens,
        }
    }

    /// One step's result came in.
    pub fn record(&self, kind: StepKind, elapsed: Duration, work: &StepWork) {
        self.num_steps[kind as usize].inc();
        self.seconds[kind as usize].observe(elapsed);
        self.prefill_tokens.inc_by(work.num_prefill_tokens);
        self.decode_tokens.inc_by(work.num_decode_rows);
    }
}

/// Why a request never ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rejection {
    /// A queue is full (429).
    QueueFull,
    /// Longer than the context or the pool (400).
    TooLong,
    /// Anything else that the request got wrong (400).
    Invalid,
    /// Loading, draining or failed (503).
    NotReady,
    /// It waited too long in the scheduler's queue (504).
    QueueTimeout,
}

impl Rejection {
    const LABELS: [&str; 5] = [
        "queue_full",
        "too_long",
        "invalid",
        "not_ready",
        "queue_timeout",
    ];
}

impl From<&Refusal> for Rejection {
    fn from(refusal: &Refusal) -> Self {
        match refusal {
            Refusal::QueueFull { .. } | Refusal::QueueTokensFull { .. } | Refusal::Displaced => {
                Self::QueueFull
            }
            Refusal::TooLongForModel { .. } | Refusal::TooLongForPool { .. } => Self::TooLong,
            Refusal::EmptyPrompt => Self::Invalid,
            Refusal::Draining => Self::NotReady,
            Refusal::Expired { .. } => Self::QueueTimeout,
        }
    }
}

/// Why a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// A stop id or stop string.
    Stop,
    /// The length that was asked for.
    Length,
    /// The client left.
    Abort,
    /// The engine failed or was closed.
    Error,
}

impl Ending {
    const LABELS: [&str; 4] = ["stop", "length", "abort", "error"];
}

impl From<FinishReason> for Ending {
    fn from(reason: FinishReason) -> Self {
        match reason {
            FinishReason::Stop => Self::Stop,
            FinishReason::Length => Self::Length,
            FinishReason::Abort => Self::Abort,
        }
    }
}

/// Requests that never ran, by [`Rejection`]; clones share their counts.
#[derive(Clone, Debug)]
pub struct Rejections([Counter; 5]);

impl Rejections {
    fn register(registry: &mut Registry) -> Self {
        Self(labelled(
            registry,
            "plait_requests_rejected",
            "Requests that never ran, by reason",
            "reason",
            Rejection::LABELS,
        ))
    }

    /// One request was not taken.
    pub fn count(&self, rejection: Rejection) {
        self.0[rejection as usize].inc();
    }
}

/// Requests and their tokens.
#[derive(Debug)]
pub struct RequestMetrics {
    finished: [Counter; 4],
    rejected: Rejections,
    /// Prompt tokens of the queued requests.
    pub prompt_tokens: Counter,
    /// Choices after the first of a prompt.
    pub further_choices: Counter,
    /// Tokens sampled and kept.
    pub generated_tokens: Counter,
    tool_calls: [Counter; 3],
}

impl RequestMetrics {
    fn register(registry: &mut Registry) -> Self {
        let finished = "Requests that ended, by reason";
        Self {
            finished: labelled(
                registry,
                "plait_requests_finished",
                finished,
                "reason",
                Ending::LABELS,
            ),
            rejected: Rejections::register(registry),
            prompt_tokens: registered(
                registry,
                "plait_prompt_tokens",
                "Prompt tokens of the requests taken",
            ),
            further_choices: registered(
                registry,
                "plait_further_choices",
                "Choices of the requests taken, but for the first of each prompt (`n`)",
            ),
            generated_tokens: registered(registry, "plait_generated_tokens", "Output tokens"),
            tool_calls: labelled(
                registry,
                "plait_tool_calls",
                "Tool calls in answers, by outcome; as_text ones are broken or of undeclared tools",
                "outcome",
                ["complete", "cut_off", "as_text"],
            ),
        }
    }

    /// One request ended.
    pub fn finish(&self, ending: Ending) {
        self.finished[ending as usize].inc();
    }

    /// One choice of an answer ended, with these calls.
    pub fn count_calls(&self, calls: CallCounts) {
        let counts = [calls.complete, calls.cut_off, calls.as_text];
        for (counter, count) in self.tool_calls.iter().zip(counts) {
            counter.inc_by(count);
        }
    }

    /// One request was not taken.
    pub fn reject(&self, rejection: Rejection) {
        self.rejected.count(rejection);
    }
}

/// The scheduler's own counts, copied after each step.
#[derive(Debug)]
pub struct SchedulerMetrics {
    running: Gauge,
    waiting: Gauge,
    pages: [Gauge; 4],
    snapshots: [Gauge; 4],
    /// Bytes of a token, a slot and a snapshot.
    cache_bytes: [Gauge; 3],
    usage: Gauge<f64, AtomicU64>,
    preemptions: Counter,
    prefix_hit_tokens: Counter,
    prefix_query_tokens: Counter,
    evictions: Counter,
    carryover: [Counter; 3],
    starvation_grants: Counter,
}

const PAGE_STATES: [&str; 4] = ["free", "leased", "cached", "parked"];
const SNAPSHOT_STATES: [&str; 4] = ["free", "writing", "findable", "parked"];
const CACHED_THINGS: [&str; 3] = ["token", "slot", "snapshot"];
const CARRYOVER_CAUSES: [&str; 3] = ["tokens", "rows", "pages"];

impl SchedulerMetrics {
    fn register(registry: &mut Registry) -> Self {
        let carryover = "Rows that had to wait for a later plan, by what was short";
        let grants = "Prefills that were served first because they had waited long";
        Self {
            running: registered(
                registry,
                "plait_requests_running",
                "Requests that hold pages",
            ),
            waiting: registered(
                registry,
                "plait_requests_waiting",
                "Requests that wait for admission",
            ),
            pages: labelled(
                registry,
                "plait_kv_pages",
                "Pages of the KV pool by state",
                "state",
                PAGE_STATES,
            ),
            snapshots: labelled(
                registry,
                "plait_kv_snapshots",
                "Snapshots of slot state by state; none unless the model keeps state for each slot",
                "state",
                SNAPSHOT_STATES,
            ),
            cache_bytes: labelled(
                registry,
                "plait_kv_cache_bytes",
                "Bytes of all ranks that a cached token, a slot and a snapshot take",
                "of",
                CACHED_THINGS,
            ),
            usage: registered(
                registry,
                "plait_kv_usage_ratio",
                "Share of the KV pool that requests hold",
            ),
            preemptions: registered(
                registry,
                "plait_preemptions",
                "Requests that gave their pages back",
            ),
            prefix_hit_tokens: registered(
                registry,
                "plait_prefix_hit_tokens",
                "Tokens of admitted requests that were in the prefix cache, returns from preemption included",
            ),
            prefix_query_tokens: registered(
                registry,
                "plait_prefix_query_tokens",
                "Tokens of admitted requests that were looked up in the prefix cache, returns from preemption included",
            ),
            evictions: registered(
                registry,
                "plait_prefix_evictions",
                "Cached pages that were given to other requests",
            ),
            carryover: labelled(
                registry,
                "plait_carryover",
                carryover,
                "cause",
                CARRYOVER_CAUSES,
            ),
            starvation_grants: registered(registry, "plait_starvation_grants", grants),
        }
    }

    /// Bytes of a token, a slot and a snapshot.
    pub fn set_cache_bytes(&self, bytes: [u64; 3]) {
        for (gauge, bytes) in self.cache_bytes.iter().zip(bytes) {
            gauge.set(i64::try_from(bytes).unwrap_or(i64::MAX));
        }
    }

    /// Copies the scheduler's counts.
    pub fn copy(&self, stats: &Stats) {
        let Stats {
            pages,
            snapshots,
            counts,
            ..
        } = stats;
        let by_state = [
            snapshots.free,
            snapshots.writing,
            snapshots.findable,
            snapshots.parked,
        ];
        for (gauge, num_snapshots) in self.snapshots.iter().zip(by_state) {
            gauge.set(num_snapshots.into());
        }
        self.running.set(stats.num_running.into());
        self.waiting.set(stats.num_waiting.into());
        let by_state = [pages.free, pages.leased, pages.cached, pages.parked];
        for (gauge, num_pages) in self.pages.iter().zip(by_state) {
            gauge.set(num_pages.into());
        }
        let num_pages: u32 = by_state.iter().sum();
        self.usage
            .set(f64::from(pages.leased + pages.parked) / f64::from(num_pages.max(1)));
        let carryover = [
            counts.carryover.tokens,
            counts.carryover.rows,
            counts.carryover.pages,
        ];
        for (counter, count) in self.carryover.iter().zip(carryover) {
            set_counter(counter, count);
        }
        set_counter(&self.prefix_hit_tokens, counts.num_hit_tokens);
        set_counter(&self.prefix_query_tokens, counts.num_query_tokens);
        set_counter(&self.evictions, counts.num_evictions);
        set_counter(&self.preemptions, counts.num_preemptions);
        set_counter(&self.starvation_grants, counts.num_starvation_grants);
    }
}

/// Measured on the driver, when results come in; text and HTTP are not included.
#[derive(Debug)]
pub struct LatencyMetrics {
    /// Submit to first token.
    pub time_to_first_token: Histogram,
    /// Token to token of one request.
    pub inter_token: Histogram,
    /// Submit to end.
    pub end_to_end: Histogram,
    /// Submit to first row in a plan.
    pub queue: Histogram,
    /// First row in a plan to first token.
    pub prefill: Histogram,
    /// First token to end.
    pub decode: Histogram,
}

impl LatencyMetrics {
    fn register(registry: &mut Registry) -> Self {
        let mut seconds = |name: &str, help: &str| {
            let histogram = Histogram::doubling(Duration::from_micros(500), 20);
            registry.register(name, help, histogram.clone());
            histogram
        };
        Self {
            time_to_first_token: seconds(
                "plait_time_to_first_token_seconds",
                "Submit to the result that brought the first token; writing it to the client comes after",
            ),
            inter_token: seconds(
                "plait_inter_token_seconds",
                "Result to result of one request; writing its tokens to the client comes after",
            ),
            end_to_end: seconds("plait_e2e_seconds", "Submit to end"),
            queue: seconds("plait_queue_seconds", "Submit to first row in a step"),
            prefill: seconds(
                "plait_prefill_seconds",
                "First row in a step to the result that brought the first token, preemptions included",
            ),
            decode: seconds(
                "plait_decode_seconds",
                "First token to end, of requests that had a token",
            ),
        }
    }
}

/// Of requests that ended.
#[derive(Debug)]
pub struct SizeMetrics {
    /// Tokens of the prompt.
    pub prompt: Histogram,
    /// Tokens sampled.
    pub output: Histogram,
}

impl SizeMetrics {
    fn register(registry: &mut Registry) -> Self {
        let mut tokens = |name: &str, help: &str| {
            let histogram = Histogram::of_tokens(21);
            registry.register(name, help, histogram.clone());
            histogram
        };
        Self {
            prompt: tokens(
                "plait_request_prompt_tokens",
                "Prompt tokens of each request that ended; each choice counts as one",
            ),
            output: tokens(
                "plait_request_output_tokens",
                "Output tokens of each request that ended; each choice counts as one",
            ),
        }
    }
}

/// Of an engine in a group; zero elsewhere.
#[derive(Debug)]
pub struct GroupMetrics {
    /// The last step that was agreed on.
    pub step: Gauge,
    /// Steps of the group in which this replica had no rows.
    pub num_dummies: Counter,
}

impl GroupMetrics {
    fn register(registry: &mut Registry) -> Self {
        Self {
            step: registered(
                registry,
                "plait_group_step",
                "The last step that the group agreed on",
            ),
            num_dummies: registered(
                registry,
                "plait_group_dummy_steps",
                "Steps of the group in which this replica had nothing to compute and ran along",
            ),
        }
    }
}

/// Of constrained answers.
#[derive(Debug)]
pub struct MaskMetrics {
    /// How long each mask took.
    pub seconds: Histogram,
    /// Rows that sampled nothing because their mask was not there.
    pub num_late: Counter,
}

impl MaskMetrics {
    fn register(registry: &mut Registry) -> Self {
        let seconds = Histogram::doubling(Duration::from_micros(16), 18);
        registry.register(
            "plait_mask_seconds",
            "Time to fill the mask of a constrained answer's next token",
            seconds.clone(),
        );
        Self {
            seconds,
            num_late: registered(
                registry,
                "plait_late_masks",
                "Rows of constrained answers that sampled nothing because their mask was not there in time",
            ),
        }
    }
}

impl Metrics {
    /// All at zero. A replica among others has its number as the label `replica`.
    pub fn new(replica: Option<u32>) -> Self {
        let label = replica.map(|number| ("replica".into(), number.to_string().into()));
        let mut registry = Registry::with_labels(label.into_iter());
        Self {
            steps: StepMetrics::register(&mut registry),
            requests: RequestMetrics::register(&mut registry),
            scheduler: SchedulerMetrics::register(&mut registry),
            step_model: StepModelMetrics::register(&mut registry),
            latency: LatencyMetrics::register(&mut registry),
            sizes: SizeMetrics::register(&mut registry),
            group: GroupMetrics::register(&mut registry),
            masks: MaskMetrics::register(&mut registry),
            losses: LossMetrics::register(&mut registry),
            num_malformed: registered(
                &mut registry,
                "plait_link_malformed",
                "Messages on the link that broke the protocol or came from strangers",
            ),
            num_kv_event_messages: registered(
                &mut registry,
                "plait_kv_event_messages",
                "Messages with KV events that were published",
            ),
            registry,
        }
    }

    fn render(&self) -> String {
        render(&self.registry)
    }
}

fn render(registry: &Registry) -> String {
    let mut page = String::new();
    text::encode_registry(&mut page, registry).expect("a string takes every byte");
    page
}

/// The metrics of an engine's replicas, and of requests that no replica got.
#[derive(Debug)]
pub struct EngineMetrics {
    replicas: Vec<Arc<Metrics>>,
    /// Of requests that no replica got.
    pub rejections: Rejections,
    /// Holds the rejections if there are several replicas; the only one's are among its own.
    front_door: Registry,
    /// Of requests that constrain their answers.
    pub grammars: GrammarMetrics,
    /// Bytes of answers that wait for the writer thread, and for Python.
    pub untaken_bytes: [Gauge; 2],
    of_engine: Registry,
}

impl EngineMetrics {
    /// All at zero.
    pub fn new(num_replicas: u32) -> Self {
        let mut front_door = Registry::default();
        let numbers = (0..num_replicas).map(|number| (num_replicas > 1).then_some(number));
        let replicas: Vec<_> = numbers
            .map(|number| Arc::new(Metrics::new(number)))
            .collect();
        let rejections = match replicas.as_slice() {
            [only] => only.requests.rejected.clone(),
            _ => Rejections::register(&mut front_door),
        };
        let mut of_engine = Registry::default();
        Self {
            replicas,
            rejections,
            front_door,
            grammars: GrammarMetrics::register(&mut of_engine),
            untaken_bytes: labelled(
                &mut of_engine,
                "plait_untaken_bytes",
                "Bytes of answers that wait for the thread that writes streams, and for the front door",
                "reader",
                ["writer", "front_door"],
            ),
            of_engine,
        }
    }

    /// One replica's.
    pub fn replica(&self, number: u32) -> &Arc<Metrics> {
        &self.replicas[number as usize]
    }

    /// `OpenMetrics` text.
    pub fn render(&self) -> String {
        let pages = self.replicas.iter().map(|replica| replica.render());
        let pages: Vec<String> = pages.chain([render(&self.front_door)]).collect();
        merge_pages(&pages) + &render(&self.of_engine) + "# EOF\n"
    }
}

/// One page with the lines of all, each metric's together. The first page has every metric.
fn merge_pages(pages: &[String]) -> String {
    const HELP: &str = "# HELP ";
    let families = |page: &'_ str| -> Vec<(String, String)> {
        let blocks = page.split(HELP).skip(1);
        let named = blocks.map(|block| {
            let name = block.split_once(' ').map_or(block, |(name, _)| name);
            (name.to_owned(), block.to_owned())
        });
        named.collect()
    };
    let (first, others) = pages.split_first().expect("an engine has a replica");
    let others: Vec<FxHashMap<String, String>> = others
        .iter()
        .map(|page| families(page).into_iter().collect())
        .collect();
    let mut merged = String::new();
    for (name, block) in families(first) {
        merged += HELP;
        merged += &block;
        for samples in others.iter().filter_map(|other| other.get(&name)) {
            let lines = samples.split_inclusive('\n');
            merged.extend(lines.skip(1).filter(|line| !line.starts_with('#')));
        }
    }
    merged
}

/// Raises a counter to `count`, which only grows.
pub(crate) fn set_counter(counter: &Counter, count: u64) {
    counter.inner().store(count, Ordering::Relaxed);
}

fn step_seconds() -> Histogram {
    Histogram::doubling(Duration::from_micros(250), 18)
}

pub(crate) fn registered<M: Metric + Clone + Default>(
    registry: &mut Registry,
    name: &str,
    help: &str,
) -> M {
    let metric = M::default();
    registry.register(name, help, metric.clone());
    metric
}

/// One metric for each of `values`; all are on the page from the start.
pub(crate) fn labelled<M: Metric + Clone + Default + TypedMetric, const N: usize>(
    registry: &mut Registry,
    name: &str,
    help: &str,
    label: &'static str,
    values: [&'static str; N],
) -> [M; N] {
    let family = Labelled::<M>::default();
    registry.register(name, help, family.clone());
    values.map(|value| family.get_or_create(&[(label, value)]).clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_label_is_on_the_page_before_anything_happens() {
        let page = EngineMetrics::new(1).render();
        for line in [
            "plait_steps_total{kind=\"mixed\"} 0",
            "plait_requests_rejected_total{reason=\"queue_full\"} 0",
            "plait_kv_pages{state=\"parked\"} 0",
            "plait_kv_snapshots{state=\"writing\"} 0",
            "plait_kv_cache_bytes{of=\"slot\"} 0",
            "plait_carryover_total{cause=\"pages\"} 0",
            "plait_time_to_first_token_seconds_count 0",
            "plait_grammars_total{result=\"refused\"} 0",
            "plait_constrained_requests_total{kind=\"json_schema\"} 0",
        ] {
            assert!(page.contains(line), "{line} is missing in\n{page}");
        }
    }

    #[test]
    fn a_step_counts_under_its_kind() {
        let metrics = Metrics::new(None);
        let work = StepWork {
            num_prefill_tokens: 100,
            num_decode_rows: 7,
            ..StepWork::default()
        };
        metrics
            .steps
            .record(StepKind::Mixed, Duration::from_millis(3), &work);
        let page = metrics.render();
        assert!(page.contains("plait_steps_total{kind=\"mixed\"} 1"));
        assert!(page.contains("plait_step_tokens_total{phase=\"prefill\"} 100"));
        assert!(page.contains("plait_step_tokens_total{phase=\"decode\"} 7"));
        assert!(page.contains("plait_step_seconds_count{kind=\"mixed\"} 1"));
    }

    #[test]
    fn a_page_of_several_replicas_has_each_metric_once_with_a_line_for_each_replica() {
        let metrics = EngineMetrics::new(2);
        metrics.replica(0).requests.prompt_tokens.inc_by(5);
        metrics.replica(1).requests.reject(Rejection::QueueFull);
        metrics.rejections.count(Rejection::Invalid);
        let page = metrics.render();
        for line in [
            "plait_prompt_tokens_total{replica=\"0\"} 5",
            "plait_prompt_tokens_total{replica=\"1\"} 0",
            "plait_requests_rejected_total{replica=\"1\",reason=\"queue_full\"} 1",
            "plait_requests_rejected_total{replica=\"0\",reason=\"queue_full\"} 0",
            "plait_requests_rejected_total{reason=\"invalid\"} 1",
            "plait_step_seconds_bucket{replica=\"1\",le=\"0.0005\",kind=\"mixed\"} 0",
            "plait_step_seconds_bucket{replica=\"1\",le=\"+Inf\",kind=\"mixed\"} 0",
        ] {
            assert!(page.contains(line), "{line} is missing in\n{page}");
        }
        let mut heads: Vec<&str> = page
            .lines()
            .filter(|line| line.starts_with("# TYPE"))
            .collect();
        let num_heads = heads.len();
        heads.dedup();
        assert_eq!(num_heads, heads.len());
        assert_eq!(page.matches("# TYPE plait_requests_rejected ").count(), 1);
        assert!(page.ends_with("# EOF\n"));
    }

    #[test]
    fn the_only_replica_has_no_label_and_counts_what_the_front_door_rejects() {
        let metrics = EngineMetrics::new(1);
        metrics.rejections.count(Rejection::NotReady);
        let page = metrics.render();
        assert!(
            page.contains("plait_requests_rejected_total{reason=\"not_ready\"} 1"),
            "{page}"
        );
        assert!(!page.contains("replica="));
    }
}
