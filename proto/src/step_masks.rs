//! Which tokens the rows of a step may sample, sent while the step computes.

use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::extensible::Extensible;
use crate::kind::Kind;
use crate::malformed::Malformed;
use crate::msgpack::{pack, unpack};
use crate::word_arrays;

/// Masks of a step whose plan says that it awaits some. The last message of a step says so; the ranks then sample.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepMasks {
    /// Which step.
    pub step: u64,
    /// No other message with masks of this step follows.
    pub is_last: bool,
    /// Words of a mask.
    pub num_mask_words: u32,
    /// Rows that sample under a mask.
    pub masked: Vec<MaskedRow>,
    /// Rows that sample nothing, counted among those that sample: their masks are late, or their tokens are not wanted.
    pub left_out: Vec<u32>,
    /// Masks that the ranks do not have.
    pub new_masks: Vec<NewMask>,
}

/// A row that samples under a mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MaskedRow {
    /// Counted among the rows that sample.
    pub row: u32,
    /// Which of its tokens; 0 without drafts.
    pub position: u32,
    /// The mask's number.
    pub mask: u32,
}

/// A mask, and the number under which the ranks keep it until another one gets that number.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewMask {
    /// Its number.
    pub mask: u32,
    /// Bit t % 32 of word t / 32 allows token t; as many words as the message says.
    #[serde(deserialize_with = "shared", serialize_with = "as_slice")]
    pub words: Arc<[u32]>,
}

fn as_slice<S: Serializer>(words: &Arc<[u32]>, serializer: S) -> Result<S::Ok, S::Error> {
    words.as_ref().serialize(serializer)
}

fn shared<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Arc<[u32]>, D::Error> {
    Vec::deserialize(deserializer).map(Arc::from)
}

/// Frame 1 of a step's masks.
#[derive(Serialize, Deserialize)]
pub struct MasksHeader {
    step: u64,
    is_last: bool,
    num_mask_words: u32,
}

impl MasksHeader {
    pub fn of(masks: &StepMasks) -> Self {
        Self {
            step: masks.step,
            is_last: masks.is_last,
            num_mask_words: masks.num_mask_words,
        }
    }
}

/// The frames after the kind.
pub fn encode_masks(masks: &StepMasks) -> Vec<Vec<u8>> {
    let mut header = Vec::new();
    pack(&mut header, &MasksHeader::of(masks));
    let mut masked = Vec::new();
    word_arrays::fill_records(&mut masked, &masks.masked, |it| {
        [it.row, it.position, it.mask]
    });
    let mut new_masks = Vec::new();
    for new in &masks.new_masks {
        word_arrays::push_records(&mut new_masks, &[new.mask], |number| [*number]);
        word_arrays::push_records(&mut new_masks, &new.words, |word| [*word]);
    }
    vec![
        header,
        masked,
        word_arrays::frame(&masks.left_out),
        new_masks,
    ]
}

/// The masks in frame 1 and the arrays after it, which are whole words.
pub fn decode_masks(header: &[u8], arrays: [&[u8]; 3]) -> Result<StepMasks, Malformed> {
    let Extensible(header): Extensible<MasksHeader> = unpack(Kind::StepMasks, header)?;
    let [masked, left_out, new_masks] = arrays.map(word_arrays::read);
    let (records, rest) = masked.as_chunks::<3>();
    if !rest.is_empty() {
        return Err(cut_record(2, masked.len(), 3));
    }
    Ok(StepMasks {
        step: header.step,
        is_last: header.is_last,
        num_mask_words: header.num_mask_words,
        masked: records
            .iter()
            .map(|&[row, position, mask]| MaskedRow {
                row,
                position,
                mask,
            })
            .collect(),
        left_out,
        new_masks: read_masks(&new_masks, header.num_mask_words)?,
    })
}

fn read_masks(words: &[u32], num_mask_words: u32) -> Result<Vec<NewMask>, Malformed> {
    let record = num_mask_words as usize + 1;
    if !words.len().is_multiple_of(record) {
        return Err(cut_record(4, words.len(), record));
    }
    let records = words.chunks_exact(record);
    Ok(records
        .map(|record| NewMask {
            mask: record[0],
            words: record[1..].into(),
        })
        .collect())
}

fn cut_record(frame: usize, given: usize, record: usize) -> Malformed {
    Malformed::CutRecord {
        kind: Kind::StepMasks,
        frame,
        given,
        record,
    }
}
