//! A step, as the engine sends it to every rank.

use serde::{Deserialize, Serialize};

use crate::adjustment::{self, Adjustment};
use crate::control::Decision;
use crate::extensible::Extensible;
use crate::kind::Kind;
use crate::malformed::Malformed;
use crate::msgpack::{pack, unpack};
use crate::new_slot::NewSlot;
use crate::slot_state::{RestoredSlot, SavedSlot};
use crate::word_arrays;

const IS_LAST_CHUNK: u32 = 1;
const LOOKAHEAD: u32 = 2;

/// One step. A worker applies it in the order freed, new, trimmed, appended, restored, rows, saved.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    // budget: one field a frame
    /// Which step; 0 is the warm-up.
    pub step: u64,
    /// Slots that take a request.
    pub new_slots: Vec<NewSlot>,
    /// The group's decision, if there is a group.
    #[serde(rename = "verdict")]
    pub decision: Option<Decision>,
    /// The first rows of the batch.
    pub prefill: Vec<PrefillRow>,
    /// The rows after them.
    pub decode: Vec<DecodeRow>,
    /// Tokens of the prefill rows, one row after the other: [`PrefillRow::num_token_ids`] of each.
    pub token_ids: Vec<u32>,
    /// Pages of kind 0 that slots gain, in the order of their positions.
    pub appended_pages: Vec<AppendedPage>,
    /// The same for the other kinds, if the replica has several.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub other_pages: Vec<OtherPage>,
    /// Slots that give back their last pages, which were leased for drafts that were not accepted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub trimmed_slots: Vec<TrimmedSlot>,
    /// What new slots change about their logits, for those that ask.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub adjustments: Vec<Adjustment>,
    /// Tokens of which new slots want the log-probabilities besides those of the best ones, in their records' order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub scored_ids: Vec<ScoredId>,
    /// New slots whose state comes from snapshots, before the step's rows.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub restored_slots: Vec<RestoredSlot>,
    /// Slots whose state becomes a snapshot. Those of one slot are in the order of their positions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub saved_slots: Vec<SavedSlot>,
    /// New slots whose hidden states are pooled.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pooled_slots: Vec<PooledSlot>,
    /// Slots that become free.
    pub freed_slots: Vec<u32>,
    /// Rows sample under masks: the ranks sample the step when its last [`crate::StepMasks`] is there.
    #[serde(default, skip_serializing_if = "is_false")]
    pub awaits_masks: bool,
}

/// A chunk of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrefillRow {
    /// Whose row.
    pub slot: u32,
    /// Position of its first token.
    pub start: u32,
    /// Tokens computed, at least 1.
    pub length: u32,
    /// A token is sampled after it.
    pub is_last_chunk: bool,
    /// One more token id follows the chunk's, which is not computed.
    pub lookahead: bool,
}

impl PrefillRow {
    /// Token ids that the row has in the plan.
    pub fn num_token_ids(&self) -> u64 {
        u64::from(self.length) + u64::from(self.lookahead)
    }

    fn words(&self) -> [u32; 4] {
        let flags =
            u32::from(self.is_last_chunk) * IS_LAST_CHUNK + u32::from(self.lookahead) * LOOKAHEAD;
        [self.slot, self.start, self.length, flags]
    }

    fn read(row: usize, &[slot, start, length, flags]: &[u32; 4]) -> Result<Self, Malformed> {
        if length == 0 {
            return Err(Malformed::EmptyChunk { row });
        }
        if flags & !(IS_LAST_CHUNK | LOOKAHEAD) != 0 {
            return Err(Malformed::UnknownFlags { row, flags });
        }
        let is_last_chunk = flags & IS_LAST_CHUNK != 0;
        let lookahead = flags & LOOKAHEAD != 0;
        Ok(Self {
            slot,
            start,
            length,
            is_last_chunk,
            lookahead,
        })
    }
}

/// One token of a request whose prompt is computed; the worker holds the token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DecodeRow {
    /// Whose row.
    pub slot: u32,
    /// Position of the first token.
    pub start: u32,
    /// Tokens computed: 1, and one more for each draft.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub length: u32,
}

fn one() -> u32 {
    1
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
fn is_false(flag: &bool) -> bool {
    !flag
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
fn is_one(length: &u32) -> bool {
    *length == 1
}

/// A page of kind 0 at the end of a slot's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AppendedPage {
    /// Whose table.
    pub slot: u32,
    /// Which page of the pool.
    pub page: u32,
}

/// A page of another kind at the end of a slot's table of that kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OtherPage {
    /// Which kind, from 1.
    pub kind: u32,
    /// Whose table.
    pub slot: u32,
    /// Which page of the kind's pool.
    pub page: u32,
}

/// A token whose log-probability a new slot's records have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScoredId {
    /// Which slot.
    pub slot: u32,
    /// Which token.
    pub id: u32,
}

/// A new slot whose hidden states are pooled: the result of the row that ends its prompt has the vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PooledSlot {
    /// Which slot.
    pub slot: u32,
    /// How.
    pub pooling: Pooling,
}

/// How a prompt's hidden states become one vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[repr(u32)]
pub enum Pooling {
    /// That of the last token.
    Last = 1,
    /// Their mean.
    Mean = 2,
}

impl Pooling {
    fn from_word(slot: u32, word: u32) -> Result<Self, Malformed> {
        let known = [Self::Last, Self::Mean];
        let found = known.into_iter().find(|it| *it as u32 == word);
        found.ok_or(Malformed::UnknownPooling { slot, word })
    }
}

/// A slot that keeps the first pages of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrimmedSlot {
    /// Which kind.
    pub kind: u32,
    /// Whose table.
    pub slot: u32,
    /// Pages that stay.
    pub num_pages: u32,
}

/// Frame 1 of a plan: borrowed when written, extensible when read.
#[derive(Serialize, Deserialize)]
pub struct PlanHeader<NewSlots, Decision> {
    step: u64,
    num_prefill: u32,
    num_decode: u32,
    new_slots: NewSlots,
    decision: Decision,
    #[serde(default, skip_serializing_if = "is_false")]
    awaits_masks: bool,
}

impl<'plan> PlanHeader<&'plan [NewSlot], &'plan Option<Decision>> {
    pub fn of(plan: &'plan Plan) -> Self {
        Self {
            step: plan.step,
            num_prefill: num_rows(&plan.prefill),
            num_decode: num_rows(&plan.decode),
            new_slots: &plan.new_slots,
            decision: &plan.decision,
            awaits_masks: plan.awaits_masks,
        }
    }
}

/// A header whose every array may have grown.
type ExtensibleHeader = PlanHeader<Vec<Extensible<NewSlot>>, Option<Extensible<Decision>>>;

fn num_rows<Row>(rows: &[Row]) -> u32 {
    u32::try_from(rows.len()).expect("a plan has at most max_rows rows, which is a u32")
}

/// Encodes plans into buffers that it keeps: after the first few, a plan costs no allocation.
#[derive(Debug, Default)]
pub struct PlanEncoder {
    frames: [Vec<u8>; 13],
    adjustments: Vec<u32>,
}

impl PlanEncoder {
    /// The frames of `plan`, the same for every rank. The last seven are left out while they are empty.
    pub fn encode(&mut self, plan: &Plan) -> &[Vec<u8>] {
        let [
            kind,
            header,
            rows,
            token_ids,
            appended_pages,
            freed_slots,
            other_pages,
            trimmed_slots,
            adjustments,
            scored_ids,
            restored_slots,
            saved_slots,
            pooled_slots,
        ] = &mut self.frames;
        kind.clear();
        kind.push(Kind::Plan as u8);
        pack(header, &PlanHeader::of(plan));
        fill_rows(rows, plan);
        word_arrays::fill(token_ids, &plan.token_ids);
        word_arrays::fill_records(appended_pages, &plan.appended_pages, |pair| {
            [pair.slot, pair.page]
        });
        word_arrays::fill(freed_slots, &plan.freed_slots);
        word_arrays::fill_records(other_pages, &plan.other_pages, |other| {
            [other.kind, other.slot, other.page]
        });
        word_arrays::fill_records(trimmed_slots, &plan.trimmed_slots, |trimmed| {
            [trimmed.kind, trimmed.slot, trimmed.num_pages]
        });
        adjustments.clear();
        if !plan.adjustments.is_empty() {
            adjustment::fill(&mut self.adjustments, &plan.adjustments);
            word_arrays::fill(adjustments, &self.adjustments);
        }
        word_arrays::fill_records(scored_ids, &plan.scored_ids, |scored| {
            [scored.slot, scored.id]
        });
        word_arrays::fill_records(restored_slots, &plan.restored_slots, |restored| {
            [restored.slot, restored.snapshot]
        });
        word_arrays::fill_records(saved_slots, &plan.saved_slots, |saved| {
            [saved.slot, saved.position, saved.snapshot]
        });
        word_arrays::fill_records(pooled_slots, &plan.pooled_slots, |pooled| {
            [pooled.slot, pooled.pooling as u32]
        });
        &self.frames[..num_frames(plan)]
    }

    /// The buffers of the plan that was encoded last.
    pub(crate) fn into_frames(self, plan: &Plan) -> Vec<Vec<u8>> {
        let mut frames = Vec::from(self.frames);
        frames.truncate(num_frames(plan));
        frames
    }
}

fn num_frames(plan: &Plan) -> usize {
    let are_there = [
        !plan.other_pages.is_empty(),
        !plan.trimmed_slots.is_empty(),
        !plan.adjustments.is_empty(),
        !plan.scored_ids.is_empty(),
        !plan.restored_slots.is_empty(),
        !plan.saved_slots.is_empty(),
        !plan.pooled_slots.is_empty(),
    ];
    let last = are_there.iter().rposition(|is_there| *is_there);
    6 + last.map_or(0, |last| last + 1)
}

fn fill_rows(frame: &mut Vec<u8>, plan: &Plan) {
    word_arrays::fill_records(frame, &plan.prefill, PrefillRow::words);
    word_arrays::push_records(frame, &plan.decode, |row| [row.slot, row.start]);
    if plan.decode.iter().any(|row| row.length != 1) {
        word_arrays::push_records(frame, &plan.decode, |row| [row.length]);
    }
}

/// The plan in frame 1 and the arrays after it, which are whole words: four, and up to seven optional ones.
pub fn decode_plan(header: &[u8], arrays: &[&[u8]]) -> Result<Plan, Malformed> {
    check_last_frame(arrays)?;
    let array =
        |frame: usize| word_arrays::read(arrays.get(frame - 2).copied().unwrap_or_default());
    let Extensible(header): Extensible<ExtensibleHeader> = unpack(Kind::Plan, header)?;
    let (prefill, decode) = read_rows(&array(2), header.num_prefill, header.num_decode)?;
    let plan = Plan {
        step: header.step,
        new_slots: header
            .new_slots
            .into_iter()
            .map(|Extensible(new_slot)| new_slot)
            .collect(),
        decision: header.decision.map(|Extensible(decision)| decision),
        prefill,
        decode,
        token_ids: array(3),
        appended_pages: read_records(4, &array(4), |[slot, page]| AppendedPage { slot, page })?,
        freed_slots: array(5),
        other_pages: read_records(6, &array(6), |[kind, slot, page]| OtherPage {
            kind,
            slot,
            page,
        })?,
        trimmed_slots: read_records(7, &array(7), |[kind, slot, num_pages]| TrimmedSlot {
            kind,
            slot,
            num_pages,
        })?,
        adjustments: adjustment::read(&array(8))?,
        scored_ids: read_records(9, &array(9), |[slot, id]| ScoredId { slot, id })?,
        restored_slots: read_records(10, &array(10), |[slot, snapshot]| RestoredSlot {
            slot,
            snapshot,
        })?,
        saved_slots: read_records(11, &array(11), |[slot, position, snapshot]| SavedSlot {
            slot,
            position,
            snapshot,
        })?,
        pooled_slots: read_pooled(&array(12))?,
        awaits_masks: header.awaits_masks,
    };
    check_token_ids(&plan)?;
    check_page_kinds(&plan)?;
    plan.new_slots.iter().try_for_each(check_finite)?;
    Ok(plan)
}

/// An empty optional frame comes only before one that is not, so that a plan has one encoding.
fn check_last_frame(arrays: &[&[u8]]) -> Result<(), Malformed> {
    let is_empty = arrays.len() > 4 && arrays.last().is_some_and(|last| last.is_empty());
    let (kind, frame) = (Kind::Plan, arrays.len() + 1);
    if is_empty {
        Err(Malformed::EmptyLastFrame { kind, frame })
    } else {
        Ok(())
    }
}

fn read_rows(
    words: &[u32],
    num_prefill: u32,
    num_decode: u32,
) -> Result<(Vec<PrefillRow>, Vec<DecodeRow>), Malformed> {
    let expected = 4 * u64::from(num_prefill) + 2 * u64::from(num_decode);
    let given = words.len() as u64;
    if given != expected && given != expected + u64::from(num_decode) {
        return Err(Malformed::WordCount {
            kind: Kind::Plan,
            frame: 2,
            given: words.len(),
            expected,
        });
    }
    let (prefill, decode) = words.split_at(4 * num_prefill as usize);
    let prefill = prefill.as_chunks::<4>().0.iter().enumerate();
    let prefill = prefill
        .map(|(row, words)| PrefillRow::read(row, words))
        .collect::<Result<_, _>>()?;
    let (decode, lengths) = decode.split_at(2 * num_decode as usize);
    if let Some(row) = lengths.iter().position(|length| *length == 0) {
        return Err(Malformed::EmptyDecodeRow { row });
    }
    let lengths = lengths.iter().copied().chain(std::iter::repeat(1));
    let decode = decode.as_chunks::<2>().0.iter().zip(lengths);
    let decode = decode.map(|(&[slot, start], length)| DecodeRow {
        slot,
        start,
        length,
    });
    Ok((prefill, decode.collect()))
}

fn read_records<T, const N: usize>(
    frame: usize,
    words: &[u32],
    read: impl Fn([u32; N]) -> T,
) -> Result<Vec<T>, Malformed> {
    let (records, rest) = words.as_chunks::<N>();
    if !rest.is_empty() {
        return Err(Malformed::CutRecord {
            kind: Kind::Plan,
            frame,
            given: words.len(),
            record: N,
        });
    }
    Ok(records.iter().map(|record| read(*record)).collect())
}

fn read_pooled(words: &[u32]) -> Result<Vec<PooledSlot>, Malformed> {
    let pairs = read_records(12, words, |[slot, word]| (slot, word))?;
    let pooled = pairs.into_iter().map(|(slot, word)| {
        Pooling::from_word(slot, word).map(|pooling| PooledSlot { slot, pooling })
    });
    pooled.collect()
}

fn check_page_kinds(plan: &Plan) -> Result<(), Malformed> {
    let mut others = plan.other_pages.iter();
    match others.find(|other| other.kind == 0) {
        Some(other) => Err(Malformed::FirstPageKind { slot: other.slot }),
        None => Ok(()),
    }
}

fn check_token_ids(plan: &Plan) -> Result<(), Malformed> {
    let expected = plan.prefill.iter().map(PrefillRow::num_token_ids).sum();
    let given = plan.token_ids.len();
    if given as u64 != expected {
        return Err(Malformed::WordCount {
            kind: Kind::Plan,
            frame: 3,
            given,
            expected,
        });
    }
    Ok(())
}

fn check_finite(new_slot: &NewSlot) -> Result<(), Malformed> {
    match new_slot.sampling.not_finite() {
        Some((field, value)) => Err(Malformed::NotFinite {
            slot: new_slot.slot,
            field,
            value: value.to_string(),
        }),
        None => Ok(()),
    }
}
