//! What the masks of a batch cost: following and filling, and how many of them differ.
//!
//! `mask_times TOKENS SCHEMAS [ROWS] [STEPS]`: the files hold JSON, the vocabulary as in `check_schemas`, and an array of
//! schemas. Answers begin under the schemas in turn and go on with tokens drawn from what is allowed, as a model of
//! random weights writes them. A new answer begins where one ends. Prints a line of JSON for compact JSON and one for
//! any white space. Times are microseconds of one thread, each the shortest of three runs that draw the same: other work
//! on the machine lengthens one of them at most. The first third of the steps is not counted: grammars warm up in it.

use std::collections::HashMap;
use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

use plait_grammar::{
    Allowed, Cancel, Constraint, Grammar, Limits, Matcher, Token, TokenId, Vocabulary, Whitespace,
    compile,
};
use serde_json::{Value, json};

type Failure = Box<dyn std::error::Error>;
/// Masks that the ranks keep, in turn.
const KEPT: [u64; 4] = [512, 1024, 2048, 4096];
const NUM_RUNS: usize = 3;

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, tokens, schemas, numbers @ ..] = &arguments[..] else {
        return Err("mask_times TOKENS SCHEMAS [ROWS] [STEPS]".into());
    };
    let number = |at: usize, usual| numbers.get(at).map_or(Ok(usual), |it| it.parse());
    let (num_rows, num_steps) = (number(0, 256)?, number(1, 128)?);
    let vocabulary = Arc::new(read_vocabulary(tokens)?);
    let schemas: Vec<Value> = serde_json::from_str(&std::fs::read_to_string(schemas)?)?;
    for whitespace in [Whitespace::None, Whitespace::Free] {
        let mut runs = Vec::new();
        for _ in 0..NUM_RUNS {
            let mut batch = Batch::new(grammars(&vocabulary, &schemas, &whitespace)?, num_rows);
            for _ in 0..num_steps {
                batch.step()?;
            }
            runs.push(batch);
        }
        let told = json!({"white_space": format!("{whitespace:?}"), "of": told(&runs, num_steps)});
        writeln!(std::io::stdout(), "{told}")?;
    }
    Ok(())
}

fn grammars(
    vocabulary: &Arc<Vocabulary>,
    schemas: &[Value],
    whitespace: &Whitespace,
) -> Result<Vec<Grammar>, Failure> {
    let compiled = schemas.iter().map(|schema| {
        let constraint = Constraint::JsonSchema(schema.to_string(), whitespace.clone());
        let (limits, cancel) = (Limits::default(), Cancel::default());
        Ok(compile(vocabulary, &constraint, 0, &limits, &cancel)?)
    });
    compiled.collect()
}

fn read_vocabulary(path: &str) -> Result<Vocabulary, Failure> {
    let texts: Vec<String> = serde_json::from_str(&std::fs::read_to_string(path)?)?;
    let bytes = |text: &String| text.chars().map(|letter| letter as u8).collect();
    let tokens: Vec<Vec<u8>> = texts.iter().map(bytes).collect();
    let end = u32::try_from(tokens.len())?;
    let texts = tokens.iter().map(|bytes| Token::Text(bytes));
    Ok(Vocabulary::new(
        texts.chain([Token::Special(b"<end>")]),
        &[end],
    )?)
}

/// A mask that was seen.
#[derive(Clone, Copy)]
struct Seen {
    /// Masks that were used before its last use.
    at: u64,
}

/// Answers that go on in step.
struct Batch {
    grammars: Vec<Grammar>,
    rows: Vec<(Matcher, Option<TokenId>)>,
    num_begun: usize,
    draw: u64,
    seen: HashMap<Vec<u32>, Seen>,
    num_uses: u64,
    follow_micros: Vec<f64>,
    fill_micros: Vec<f64>,
    /// Masks of each step that are not among those used last.
    num_new: [usize; KEPT.len()],
    num_distinct: usize,
    num_allowed: Vec<u32>,
}

impl Batch {
    fn new(grammars: Vec<Grammar>, num_rows: usize) -> Self {
        let rows = (0..num_rows).map(|row| (grammars[row % grammars.len()].matcher(), None));
        Self {
            rows: rows.collect(),
            num_begun: num_rows,
            grammars,
            draw: 0x9e37_79b9_7f4a_7c15,
            seen: HashMap::new(),
            num_uses: 0,
            follow_micros: Vec::new(),
            fill_micros: Vec::new(),
            num_new: [0; KEPT.len()],
            num_distinct: 0,
            num_allowed: Vec::new(),
        }
    }

    fn step(&mut self) -> Result<(), Failure> {
        let mut of_step = HashMap::new();
        for row in 0..self.rows.len() {
            let mut mask = vec![0; self.grammars[0].num_mask_words()];
            self.follow(row)?;
            while self.fill(row, &mut mask)? != Allowed::Some {
                self.num_begun += 1;
                let grammar = &self.grammars[self.num_begun % self.grammars.len()];
                self.rows[row] = (grammar.matcher(), None);
            }
            self.rows[row].1 = Some(self.choose(&mask));
            of_step.insert(mask, ());
        }
        self.num_distinct += of_step.len();
        of_step.into_keys().for_each(|mask| self.note(mask));
        Ok(())
    }

    fn follow(&mut self, row: usize) -> Result<(), Failure> {
        let (matcher, token) = &mut self.rows[row];
        let start = Instant::now();
        if let Some(token) = token.take() {
            matcher.accept(token)?;
        }
        self.follow_micros.push(start.elapsed().as_secs_f64() * 1e6);
        Ok(())
    }

    fn fill(&mut self, row: usize, mask: &mut [u32]) -> Result<Allowed, Failure> {
        let start = Instant::now();
        let allowed = self.rows[row].0.allowed(mask)?;
        self.fill_micros.push(start.elapsed().as_secs_f64() * 1e6);
        Ok(allowed)
    }

    /// Any token that is allowed.
    fn choose(&mut self, mask: &[u32]) -> TokenId {
        let num_allowed: u32 = mask.iter().map(|word| word.count_ones()).sum();
        self.num_allowed.push(num_allowed);
        self.draw ^= self.draw << 13;
        self.draw ^= self.draw >> 7;
        self.draw ^= self.draw << 17;
        let mut left = (self.draw >> 32) as u32 % num_allowed;
        for (word, base) in mask.iter().zip((0..).step_by(32)) {
            if left < word.count_ones() {
                let mut bits = (0..32).filter(|bit| word >> bit & 1 == 1);
                let bit = bits.nth(left as usize);
                return base + bit.unwrap_or_default();
            }
            left -= word.count_ones();
        }
        0
    }

    fn note(&mut self, mask: Vec<u32>) {
        self.num_uses += 1;
        let at = self.num_uses;
        let before = self.seen.insert(mask, Seen { at });
        for (kept, num_new) in KEPT.iter().zip(&mut self.num_new) {
            *num_new += usize::from(before.is_none_or(|it| it.at + kept < at));
        }
    }
}

/// What a row's token takes in each run, at least; `of` are the times of a run.
fn shortest(runs: &[Batch], of: impl Fn(&Batch) -> &[f64]) -> Vec<f64> {
    let num_counted = of(&runs[0]).len() * 2 / 3;
    let skipped = of(&runs[0]).len() - num_counted;
    let least = |at| runs.iter().map(|it| of(it)[at]).fold(f64::MAX, f64::min);
    (skipped..skipped + num_counted).map(least).collect()
}

fn summary(mut of: Vec<f64>) -> Value {
    of.sort_by(f64::total_cmp);
    let mean = of.iter().sum::<f64>() / of.len() as f64;
    let at = |percent: usize| of[(of.len() - 1) * percent / 100].round();
    json!({"mean": mean.round(), "p50": at(50), "p90": at(90), "p99": at(99), "max": at(100)})
}

fn told(runs: &[Batch], num_steps: usize) -> Value {
    let (last, steps) = (&runs[runs.len() - 1], num_steps as f64);
    let fill = shortest(runs, |it| &it.fill_micros);
    let of_steps = fill.chunks(last.rows.len()).map(|step| step.iter().sum());
    let few = last.num_allowed.iter().filter(|it| **it <= 256).count();
    let new = KEPT.iter().zip(last.num_new);
    let new = new.map(|(kept, new)| (kept.to_string(), json!(new as f64 / steps)));
    json!({
        "follow_us": summary(shortest(runs, |it| &it.follow_micros)),
        "fill_us": summary(fill.clone()),
        "fill_us_of_a_step": summary(of_steps.collect()),
        "distinct_masks_a_step": last.num_distinct as f64 / steps,
        "distinct_masks": last.seen.len(),
        "new_masks_a_step_by_masks_kept": new.collect::<serde_json::Map<_, _>>(),
        "share_of_rows_with_few_tokens": few as f64 / last.num_allowed.len() as f64,
        "answers_begun": last.num_begun,
    })
}
