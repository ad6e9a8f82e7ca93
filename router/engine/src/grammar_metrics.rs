//! Counters of constrained requests, from the text threads.

use std::time::Duration;

use plait_openai::GrammarOutcome;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::registry::Registry;

use crate::histogram::Histogram;
use crate::metrics::labelled;

/// Kinds of constraints, as `plait_grammar::Constraint::kind` names them.
const KINDS: [&str; 8] = [
    "json_object",
    "json_schema",
    "regex",
    "choice",
    "grammar",
    "structural_tag",
    "tools",
    "thought",
];

/// What became of requests' constraints.
#[derive(Clone, Debug)]
pub struct GrammarMetrics {
    num_requests: [Counter; KINDS.len()],
    compiled: Counter,
    cached: Counter,
    refused: Counter,
    compile_seconds: Histogram,
}

impl GrammarMetrics {
    pub(crate) fn register(registry: &mut Registry) -> Self {
        let num_requests = labelled(
            registry,
            "plait_constrained_requests",
            "Requests by what they constrained their answers to",
            "kind",
            KINDS,
        );
        let [compiled, cached, refused] = labelled(
            registry,
            "plait_grammars",
            "Constraints that were compiled, found in the cache, or refused",
            "result",
            ["compiled", "cached", "refused"],
        );
        let compile_seconds = Histogram::doubling(Duration::from_micros(500), 13);
        registry.register(
            "plait_grammar_compile_seconds",
            "Time to compile a constraint",
            compile_seconds.clone(),
        );
        Self {
            num_requests,
            compiled,
            cached,
            refused,
            compile_seconds,
        }
    }

    /// A request's constraint of this kind became this.
    pub fn count(&self, kind: &str, outcome: GrammarOutcome) {
        if let Some(index) = KINDS.iter().position(|known| *known == kind) {
            self.num_requests[index].inc();
        }
        match outcome {
            GrammarOutcome::Compiled(elapsed) => {
                self.compiled.inc();
                self.compile_seconds.observe(elapsed);
            }
            GrammarOutcome::Cached => {
                self.cached.inc();
            }
            GrammarOutcome::Refused => {
                self.refused.inc();
            }
        }
    }
}
