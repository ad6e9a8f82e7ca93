//! Broken bytes for every decoder of Plait's crates: no panic, no hang, no memory beyond a bound.
//!
//! `plait-fuzz list` · `plait-fuzz run TARGET SEED inputs|seconds N FOLDER` · `plait-fuzz keep TARGET SEED NUMBER FOLDER`.
//! `run` prints a line of JSON and writes the inputs that failed into FOLDER; a process that did not survive leaves the
//! number of its last input in FOLDER/TARGET.at. An input follows from target, seed, number and corpus.

mod memory;
mod mutate;
mod random;
mod run;
mod targets;
mod watchdog;

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use crate::run::{Run, Until, keep, keep_failures};
use crate::targets::Target;

#[global_allocator]
static ALLOCATOR: memory::Counted = memory::Counted;

const USAGE: &str =
    "plait-fuzz list | run TARGET SEED inputs|seconds N FOLDER | keep TARGET SEED NUMBER FOLDER";

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match answer(&words) {
        Some((lines, is_well)) => {
            let _reader_is_gone = writeln!(io::stdout(), "{lines}");
            if is_well {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            }
        }
        None => {
            let _reader_is_gone = writeln!(io::stderr(), "{USAGE}");
            ExitCode::from(2)
        }
    }
}

/// What is printed, and whether nothing failed; `None` if the words say nothing.
fn answer(words: &[&str]) -> Option<(String, bool)> {
    match words {
        ["list"] => {
            let names: Vec<_> = targets::all().iter().map(|it| it.name).collect();
            Some((names.join("\n"), true))
        }
        ["run", name, seed, unit, number, folder] => {
            let until = until(unit, number.parse().ok()?)?;
            Some(run_target(
                &target(name)?,
                seed.parse().ok()?,
                until,
                Path::new(folder),
            ))
        }
        ["keep", name, seed, number, folder] => {
            let target = target(name)?;
            let run = Run::new(&target, seed.parse().ok()?);
            let path = keep(&run, number.parse().ok()?, Path::new(folder));
            Some((path.display().to_string(), true))
        }
        _ => None,
    }
}

fn target(name: &str) -> Option<Target> {
    targets::all().into_iter().find(|it| it.name == name)
}

fn until(unit: &str, number: u64) -> Option<Until> {
    match unit {
        "inputs" => Some(Until::Inputs(number)),
        "seconds" => Some(Until::Passed(Duration::from_secs(number))),
        _ => None,
    }
}

fn run_target(target: &Target, seed: u64, until: Until, folder: &Path) -> (String, bool) {
    fs::create_dir_all(folder).expect("the folder can be made");
    let at = File::create(folder.join(format!("{}.at", target.name))).expect("a file can be made");
    watchdog::start();
    let run = Run::new(target, seed);
    let found = run.go(until, Some(&at));
    keep_failures(&run, &found, folder);
    (found.to_json(target).to_string(), found.failures.is_empty())
}

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, PoisonError};

    use super::*;

    const SEED: u64 = 1;
    /// Held by each test that runs: what another one takes of the process's memory and time would be counted, too.
    static RUNNING: Mutex<()> = Mutex::new(());

    #[test]
    fn a_reduced_run_finds_no_failure() {
        let _alone = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
        watchdog::start();
        for target in targets::all() {
            let found = Run::new(&target, SEED).go(Until::Inputs(target.num_reduced), None);
            assert!(
                found.failures.is_empty(),
                "{} {:?}",
                target.name,
                found.failures
            );
        }
    }

    #[test]
    fn the_same_words_make_the_same_inputs() {
        let target = target("frames").unwrap();
        let (one, other) = (Run::new(&target, SEED), Run::new(&target, SEED));
        assert!((0..200).all(|number| one.input(number) == other.input(number)));
        let other = Run::new(&target, SEED + 1);
        assert!((0..200).any(|number| one.input(number) != other.input(number)));
    }

    #[test]
    fn a_panic_and_too_much_memory_are_failures() {
        let _alone = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
        let target = Target {
            name: "frames",
            words: &[],
            max_mib: 1,
            num_reduced: 1,
            decode: |input| match input.len() % 2 {
                0 => panic!("of this input"),
                _ => Vec::<u8>::with_capacity(8 << 20).is_empty(),
            },
        };
        let found = Run::new(&target, SEED).go(Until::Inputs(40), None);
        let kinds = ["panicked", "bytes of memory"];
        assert!(
            kinds
                .iter()
                .all(|it| found.failures.iter().any(|(_, why)| why.contains(it)))
        );
    }
}
