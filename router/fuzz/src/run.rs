//! A target's inputs, one after the other: the corpus first, then spoilt ones.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::memory::peak_of;
use crate::mutate::mutate;
use crate::random::Random;
use crate::targets::Target;
use crate::watchdog;

/// When a run ends.
#[derive(Clone, Copy, Debug)]
pub enum Until {
    /// So many inputs beside the corpus.
    Inputs(u64),
    /// So long.
    Passed(Duration),
}

/// What a run found.
#[derive(Debug, Default)]
pub struct Found {
    num_inputs: u64,
    num_taken: u64,
    peak_bytes: usize,
    slowest_millis: u64,
    /// Numbers of the inputs that failed, and why.
    pub failures: Vec<(u64, String)>,
}

impl Found {
    /// One line of a record.
    pub fn to_json(&self, target: &Target) -> Value {
        json!({
            "target": target.name, "inputs": self.num_inputs, "taken": self.num_taken, "peak_bytes": self.peak_bytes,
            "slowest_cpu_ms": self.slowest_millis, "failures": self.failures,
        })
    }
}

/// A target with its corpus.
pub struct Run<'a> {
    target: &'a Target,
    seed: u64,
    corpus: Vec<Vec<u8>>,
}

impl<'a> Run<'a> {
    /// Reads the corpus.
    pub fn new(target: &'a Target, seed: u64) -> Self {
        let corpus = target.corpus();
        Self {
            target,
            seed,
            corpus,
        }
    }

    /// The input of this number: one of the corpus, or made from some of them.
    pub fn input(&self, number: u64) -> Vec<u8> {
        if let Some(kept) = usize::try_from(number)
            .ok()
            .and_then(|it| self.corpus.get(it))
        {
            return kept.clone();
        }
        let mut random = Random::of_input(self.target.name, self.seed, number);
        let mut input = random.one_of(&self.corpus).clone();
        mutate(&mut input, self.target.words, &self.corpus, &mut random);
        input
    }

    /// Decodes inputs. The number of the one under way is in `at`, for a process that does not survive it.
    pub fn go(&self, until: Until, at: Option<&File>) -> Found {
        let mut found = Found::default();
        // What is made once, at the first use, is no input's.
        let _warm = catch_unwind(|| (self.target.decode)(&self.corpus[0]));
        let begin = Instant::now();
        for number in 0.. {
            let is_over = match until {
                Until::Inputs(num) => number >= num + self.corpus.len() as u64,
                Until::Passed(time) => number % 16 == 0 && begin.elapsed() >= time,
            };
            if is_over {
                break;
            }
            if let Some(at) = at {
                let _no_matter = at.write_all_at(&number.to_le_bytes(), 0);
            }
            self.decode(number, &mut found);
        }
        found
    }

    fn decode(&self, number: u64, found: &mut Found) {
        let input = self.input(number);
        watchdog::begin();
        let before = watchdog::cpu_millis();
        let decode = AssertUnwindSafe(|| (self.target.decode)(&input));
        let (peak, taken) = peak_of(|| catch_unwind(decode));
        let millis = watchdog::cpu_millis() - before;
        watchdog::end();
        found.num_inputs += 1;
        found.num_taken += u64::from(matches!(taken, Ok(true)));
        found.peak_bytes = found.peak_bytes.max(peak);
        found.slowest_millis = found.slowest_millis.max(millis);
        let allowed = (self.target.max_mib << 20) + 64 * input.len();
        if taken.is_err() {
            found.failures.push((number, "it panicked".to_owned()));
        } else if peak > allowed {
            let problem = format!("it took {peak} bytes of memory; {allowed} are allowed");
            found.failures.push((number, problem));
        }
    }
}

/// Writes the inputs that failed into `folder`, for the corpus; their paths.
pub fn keep_failures(run: &Run<'_>, found: &Found, folder: &Path) -> Vec<PathBuf> {
    let numbers = found.failures.iter().map(|(number, _)| *number);
    numbers.map(|number| keep(run, number, folder)).collect()
}

/// Writes one input into `folder`.
pub fn keep(run: &Run<'_>, number: u64, folder: &Path) -> PathBuf {
    let path = folder.join(format!("{}-{}-{number}", run.target.name, run.seed));
    fs::create_dir_all(folder).expect("the folder can be made");
    fs::write(&path, run.input(number)).expect("an input can be written");
    path
}
