//! A result's log-probabilities, by the requests that asked for them.

use plait_core::RequestId;
use plait_openai::TokenLogprobs;
use plait_proto::{LogprobRecord, LogprobRecords, StepResult};

use crate::step::{MeasuredRow, StepInFlight};

/// A frame with other records than the plan asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the {frame} of step {step} are not those that its plan asked for")]
pub struct WrongRecords {
    frame: &'static str,
    step: u64,
}

/// New records of one request's prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptRecords {
    /// Whose.
    pub request: RequestId,
    /// Position of the first record's token.
    pub first_position: u32,
    /// One for each position.
    pub records: Vec<TokenLogprobs>,
}

/// The records of the rows that sampled, in row order; empty where no request asked.
pub fn of_samples(
    step: &StepInFlight,
    result: &StepResult,
) -> Result<Vec<Option<Vec<TokenLogprobs>>>, WrongRecords> {
    let wrong = WrongRecords {
        frame: "log-probabilities",
        step: step.step,
    };
    let mut records = LogprobRecords::new(&result.logprobs);
    let rows =
        step.sampled.iter().zip(&result.num_accepted).map(
            |(num_top, num_accepted)| match num_top {
                None => Ok(None),
                Some(num_top) => take(&mut records, *num_accepted, *num_top)
                    .map(Some)
                    .ok_or(wrong),
            },
        );
    let rows = rows.collect::<Result<_, _>>()?;
    if records.is_empty() {
        Ok(rows)
    } else {
        Err(wrong)
    }
}

/// The records of prompts, without those that were sent before a preemption.
pub fn of_prompts(
    step: &StepInFlight,
    result: &StepResult,
) -> Result<Vec<PromptRecords>, WrongRecords> {
    let wrong = WrongRecords {
        frame: "prompt log-probabilities",
        step: step.step,
    };
    let mut records = LogprobRecords::new(&result.prompt_logprobs);
    let rows = step.measured.iter().map(|row| {
        let taken = take(&mut records, row.num_records, row.num_top).ok_or(wrong)?;
        Ok(wanted(row, taken))
    });
    let rows = rows.collect::<Result<_, _>>()?;
    if records.is_empty() {
        Ok(rows)
    } else {
        Err(wrong)
    }
}

/// The vectors of the prompts that ended, by their requests.
pub fn of_pooled(
    step: &StepInFlight,
    result: &StepResult,
) -> Result<Vec<(RequestId, Vec<f32>)>, WrongRecords> {
    let wrong = WrongRecords {
        frame: "pooled vectors",
        step: step.step,
    };
    let (num_rows, num_words) = (step.pooled.len(), result.pooled.len());
    if num_rows == 0 {
        return if num_words == 0 {
            Ok(Vec::new())
        } else {
            Err(wrong)
        };
    }
    if num_words == 0 || num_words % num_rows != 0 {
        return Err(wrong);
    }
    let vectors = result.pooled.chunks(num_words / num_rows);
    let floats = |words: &[u32]| words.iter().map(|&bits| f32::from_bits(bits)).collect();
    Ok(step
        .pooled
        .iter()
        .copied()
        .zip(vectors.map(floats))
        .collect())
}

fn take(
    records: &mut LogprobRecords<'_>,
    num_records: u32,
    num_top: u32,
) -> Option<Vec<TokenLogprobs>> {
    (0..num_records)
        .map(|_| records.take(num_top).map(|record| to_owned_record(&record)))
        .collect()
}

fn wanted(row: &MeasuredRow, records: Vec<TokenLogprobs>) -> PromptRecords {
    let records = (row.first_position..)
        .zip(records)
        .filter_map(|(position, record)| row.wanted.contains(&position).then_some(record))
        .collect();
    PromptRecords {
        request: row.request,
        first_position: row.wanted.start,
        records,
    }
}

fn to_owned_record(record: &LogprobRecord<'_>) -> TokenLogprobs {
    TokenLogprobs {
        logprob: record.logprob,
        rank: record.rank,
        best: record
            .top_ids
            .iter()
            .copied()
            .zip(record.top_logprobs())
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::StepKind;
    use plait_core::StepWork;

    fn step(sampled: Vec<Option<u32>>, measured: Vec<MeasuredRow>) -> StepInFlight {
        StepInFlight {
            step: 3,
            kind: Some(StepKind::Decode),
            work: StepWork::default(),
            limit: std::time::Duration::ZERO,
            sampled,
            measured,
            pooled: Vec::new(),
            awaiting: Vec::new(),
            left_out: Vec::new(),
            forward_is_done: false,
        }
    }

    fn record(logprob: f32, top: &[(u32, f32)]) -> Vec<u32> {
        let ids = top.iter().map(|(id, _)| *id);
        let values = top.iter().map(|(_, logprob)| logprob.to_bits());
        [logprob.to_bits(), 1]
            .into_iter()
            .chain(ids)
            .chain(values)
            .collect()
    }

    #[test]
    fn each_row_gets_its_own_records() {
        let result = StepResult {
            num_accepted: vec![1, 1, 1],
            logprobs: [record(-1.0, &[(5, -1.0)]), record(-2.0, &[])].concat(),
            ..StepResult::default()
        };
        let rows = of_samples(&step(vec![Some(1), None, Some(0)], vec![]), &result).unwrap();
        assert_eq!(rows[0].as_ref().unwrap()[0].best, [(5, -1.0)]);
        assert_eq!(rows[1], None);
        assert_eq!(rows[2].as_ref().unwrap()[0].logprob, -2.0);
    }

    #[test]
    fn a_missing_or_surplus_record_is_the_ranks_fault() {
        let result = StepResult {
            num_accepted: vec![1],
            logprobs: record(-1.0, &[]),
            ..StepResult::default()
        };
        assert!(of_samples(&step(vec![Some(1)], vec![]), &result).is_err());
        assert!(of_samples(&step(vec![None], vec![]), &result).is_err());
    }

    #[test]
    fn prompt_records_told_before_are_left_out() {
        let row = MeasuredRow {
            request: RequestId(1),
            num_top: 0,
            first_position: 1,
            num_records: 3,
            wanted: 3..4,
        };
        let result = StepResult {
            prompt_logprobs: [record(-1.0, &[]), record(-2.0, &[]), record(-3.0, &[])].concat(),
            ..StepResult::default()
        };
        let told = of_prompts(&step(vec![], vec![row]), &result).unwrap();
        assert_eq!(told[0].first_position, 3);
        assert_eq!(told[0].records.len(), 1);
        assert_eq!(told[0].records[0].logprob, -3.0);
    }
}
