//! From a constraint to a grammar, on a thread that nobody waits for longer than allowed.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use llguidance::TokenParser;
use llguidance::api::{GrammarInit, StopReason, TopLevelGrammar};

use crate::abandoned::Abandoned;
use crate::constraint::Constraint;
use crate::error::{CompileError, is_too_complex};
use crate::grammar::Grammar;
use crate::limits::{Cancel, Limits};
use crate::productive;
use crate::vocabulary::Vocabulary;

/// The library recurses over schemas and their references.
const STACK_BYTES: usize = 256 << 20;
/// How often a waiting thread looks whether it waits in vain.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);
/// Of all engines of the process.
static ABANDONED: Abandoned = Abandoned::new();

type Compiled = Result<Grammar, CompileError>;

/// Compiles a constraint of a tenant for a model's tokens, in at most `limits.compile_time` of computing.
///
/// The library's caps bound the work, but it cannot be stopped within: what takes longer ends by itself, unheard. A
/// tenant whose work goes on so is busy, and no other.
pub fn compile(
    vocabulary: &Arc<Vocabulary>,
    constraint: &Constraint,
    tenant: u64,
    limits: &Limits,
    cancel: &Cancel,
) -> Compiled {
    constraint.check_sizes(limits)?;
    if *constraint == Constraint::Free {
        return Ok(Grammar::free(vocabulary.clone()));
    }
    if !ABANDONED.may_begin(tenant) {
        return Err(CompileError::Busy);
    }
    let (compiled, result) = sync_channel(1);
    let job = Job {
        vocabulary: vocabulary.clone(),
        constraint: constraint.clone(),
        limits: limits.clone(),
        run: Arc::new(Run::of(tenant)),
    };
    let run = job.run.clone();
    thread::Builder::new()
        .name("plait-grammar".to_owned())
        .stack_size(STACK_BYTES)
        .spawn(move || job.run(&compiled))
        .map_err(|_| CompileError::Busy)?;
    let start = Instant::now();
    loop {
        match result.recv_timeout(LOOK_INTERVAL) {
            Ok(compiled) => return compiled,
            Err(RecvTimeoutError::Disconnected) => return Err(panicked()),
            Err(RecvTimeoutError::Timeout) => {}
        }
        let error = match run.spent(start.elapsed()) {
            _ if cancel.is_cancelled() => CompileError::Cancelled,
            spent if spent >= limits.compile_time => CompileError::TooSlow(limits.compile_time),
            _ => continue,
        };
        run.leave();
        return Err(error);
    }
}

/// What a thread compiles.
struct Job {
    vocabulary: Arc<Vocabulary>,
    constraint: Constraint,
    limits: Limits,
    run: Arc<Run>,
}

impl Job {
    fn run(self, compiled: &SyncSender<Compiled>) {
        self.run.begin();
        let _end = EndOnDrop(self.run.clone());
        // Nobody may wait any more.
        let _unheard = compiled.send(self.compile());
    }

    fn compile(&self) -> Compiled {
        let lowered = self.constraint.lowered(&self.vocabulary, &self.limits)?;
        let mut parser = self.parser(lowered)?;
        let num_symbols = productive::check(parser.parser.grammar())?;
        parser.start_without_prompt();
        let first = self.first_mask(&parser)?;
        Ok(Grammar::new(
            self.vocabulary.clone(),
            parser,
            first,
            num_symbols,
        ))
    }

    fn parser(&self, lowered: TopLevelGrammar) -> Result<TokenParser, CompileError> {
        let init = GrammarInit::Serialized(lowered);
        let parser = self
            .vocabulary
            .factory
            .create_parser_from_init_default(init);
        parser.map_err(|error| CompileError::from_library(&format!("{error:#}")))
    }

    /// Tells whether any answer begins, and whether its first mask takes too much.
    fn first_mask(&self, parser: &TokenParser) -> Result<Arc<[u32]>, CompileError> {
        let mut matcher = llguidance::Matcher::new(Ok(parser.deep_clone()));
        let allowed = matcher.compute_mask().map_err(|error| {
            let problem = error.to_string();
            match matcher.stop_reason() {
                StopReason::LexerTooComplex | StopReason::ParserTooComplex => {
                    CompileError::too_complex(&problem)
                }
                _ if is_too_complex(&problem) => CompileError::too_complex(&problem),
                _ => {
                    CompileError::Empty("no token of the model's vocabulary begins one".to_owned())
                }
            }
        })?;
        let num_words = self.vocabulary.num_mask_words();
        Ok(allowed.as_slice()[..num_words].into())
    }
}

/// A thread that compiles, for both sides of it.
struct Run {
    tenant: u64,
    /// At first 0: it works, and somebody waits.
    state: AtomicU8,
    /// Where the system says how long it worked.
    clock: OnceLock<PathBuf>,
}

const IS_ABANDONED: u8 = 1;
const HAS_ENDED: u8 = 2;

impl Run {
    fn of(tenant: u64) -> Self {
        Self {
            tenant,
            state: AtomicU8::new(0),
            clock: OnceLock::new(),
        }
    }

    /// Called by the thread itself.
    fn begin(&self) {
        if let Ok(thread) = fs::read_link("/proc/thread-self") {
            let _first = self
                .clock
                .set(Path::new("/proc").join(thread).join("schedstat"));
        }
    }

    /// Nobody waits any more.
    fn leave(&self) {
        ABANDONED.add(self.tenant);
        if self.state.swap(IS_ABANDONED, Ordering::AcqRel) == HAS_ENDED {
            ABANDONED.remove(self.tenant);
        }
    }

    fn end(&self) {
        if self.state.swap(HAS_ENDED, Ordering::AcqRel) == IS_ABANDONED {
            ABANDONED.remove(self.tenant);
        }
    }

    /// Time that it has computed, of the time `since` it began: on a busy machine it waits for a core. A tenth of the
    /// time counts in any case, and all of it where the system does not say more.
    fn spent(&self, since: Duration) -> Duration {
        let computed = self.clock.get().and_then(|clock| {
            let text = fs::read_to_string(clock).ok()?;
            let nanos = text.split_whitespace().next()?.parse().ok()?;
            Some(Duration::from_nanos(nanos))
        });
        computed.map_or(since, |computed| computed.max(since / 10))
    }
}

struct EndOnDrop(Arc<Run>);

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        self.0.end();
    }
}

fn panicked() -> CompileError {
    CompileError::TooComplex("the compiler gave up".to_owned())
}
