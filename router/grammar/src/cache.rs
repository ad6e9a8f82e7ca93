//! Compiled grammars by what they constrain, up to so many bytes.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crate::compile::compile;
use crate::constraint::Constraint;
use crate::error::CompileError;
use crate::grammar::Grammar;
use crate::limits::{Cancel, Limits};
use crate::vocabulary::Vocabulary;

type Compiled = Result<Grammar, CompileError>;

/// Grammars that requests share. What was refused is remembered too, so that it takes its time once.
#[derive(Debug)]
pub struct GrammarCache {
    max_bytes: usize,
    entries: Mutex<Entries>,
}

#[derive(Debug, Default)]
struct Entries {
    by_constraint: HashMap<Constraint, Entry>,
    num_uses: u64,
}

#[derive(Debug)]
struct Entry {
    /// Threads that want the same grammar wait for the first.
    compiled: Arc<OnceLock<Compiled>>,
    last_use: u64,
}

impl Entry {
    fn num_bytes(&self, constraint: &Constraint) -> usize {
        let grammar = match self.compiled.get() {
            Some(Ok(grammar)) => grammar.num_bytes(),
            _ => 0,
        };
        size_of::<Self>() + constraint.num_bytes() + grammar
    }
}

impl GrammarCache {
    /// An empty cache.
    pub fn new(max_bytes: usize) -> Self {
        Self {
            max_bytes,
            entries: Mutex::default(),
        }
    }

    /// The constraint's grammar, compiled now for the tenant unless it is there; and whether it was.
    pub fn get(
        &self,
        vocabulary: &Arc<Vocabulary>,
        constraint: &Constraint,
        tenant: u64,
        limits: &Limits,
        cancel: &Cancel,
    ) -> (Compiled, bool) {
        if let Err(error) = constraint.check_sizes(limits) {
            return (Err(error), false);
        }
        let entry = self.enter(constraint);
        let mut was_there = true;
        let compiled = entry.get_or_init(|| {
            was_there = false;
            compile(vocabulary, constraint, tenant, limits, cancel)
        });
        if !was_there {
            self.settle(constraint, compiled);
        }
        (compiled.clone(), was_there)
    }

    /// The constraint's grammar, or why it has none, if that is known by now. Never compiles, and never waits.
    pub fn known(&self, constraint: &Constraint, limits: &Limits) -> Option<Compiled> {
        if let Err(error) = constraint.check_sizes(limits) {
            return Some(Err(error));
        }
        let mut entries = self.lock();
        entries.num_uses += 1;
        let now = entries.num_uses;
        let entry = entries.by_constraint.get_mut(constraint)?;
        entry.last_use = now;
        entry.compiled.get().cloned()
    }

    /// Memory that it keeps, about.
    pub fn num_bytes(&self) -> usize {
        let entries = self.lock();
        let entries = entries.by_constraint.iter();
        entries
            .map(|(constraint, entry)| entry.num_bytes(constraint))
            .sum()
    }

    fn enter(&self, constraint: &Constraint) -> Arc<OnceLock<Compiled>> {
        let mut entries = self.lock();
        entries.num_uses += 1;
        let now = entries.num_uses;
        if let Some(entry) = entries.by_constraint.get_mut(constraint) {
            entry.last_use = now;
            return entry.compiled.clone();
        }
        let entry = Entry {
            compiled: Arc::default(),
            last_use: now,
        };
        let compiled = entry.compiled.clone();
        entries.by_constraint.insert(constraint.clone(), entry);
        compiled
    }

    /// Makes room for what was compiled; what another try may compile is forgotten.
    fn settle(&self, constraint: &Constraint, compiled: &Compiled) {
        let mut entries = self.lock();
        if let Err(CompileError::Busy | CompileError::Cancelled) = compiled {
            entries.by_constraint.remove(constraint);
        }
        entries.shrink(self.max_bytes);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entries {
    /// Drops what was not used for longest. Answers under way keep their grammars.
    fn shrink(&mut self, max_bytes: usize) {
        let sizes = self.by_constraint.iter();
        let sizes = sizes.map(|(constraint, entry)| (entry.last_use, entry.num_bytes(constraint)));
        let mut sizes: Vec<(u64, usize)> = sizes.collect();
        sizes.sort_unstable_by_key(|(last_use, _)| std::cmp::Reverse(*last_use));
        let mut num_bytes = 0;
        let kept = sizes.iter().take_while(|(_, size)| {
            num_bytes += size;
            num_bytes <= max_bytes
        });
        let num_kept = kept.count();
        let Some((last_dropped, _)) = sizes.get(num_kept) else {
            return;
        };
        self.by_constraint
            .retain(|_, entry| entry.last_use > *last_dropped);
    }
}
