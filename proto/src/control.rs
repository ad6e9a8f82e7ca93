//! The messages that are one array and nothing else.

use serde::ser::SerializeStruct;
use serde::{Deserialize, Serialize, Serializer};
use serde_bytes::Bytes;

use crate::capped_text::{self, MAX_TEXT_BYTES, cut};
use crate::fingerprint::Fingerprint;
use crate::slot_state::SlotState;

/// The protocol that this crate speaks.
pub const PROTOCOL: u32 = 1;

/// A worker has loaded its weights and is ready to serve.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Hello {
    /// [`PROTOCOL`] of the worker.
    pub protocol: u32,
    /// [`crate::schema_fingerprint`] of the worker.
    #[serde(with = "serde_bytes")]
    pub schema: Fingerprint,
    /// [`crate::config_fingerprint`] of the configuration file that the worker was given.
    #[serde(with = "serde_bytes")]
    pub config: Fingerprint,
    /// Which rank of the replica it is.
    pub rank: u32,
    /// Ranks of the replica, from the worker's configuration.
    pub world: u32,
    /// Its process.
    pub pid: u32,
    /// Its device, for people.
    #[serde(deserialize_with = "capped_text::deserialize")]
    pub device: String,
    /// Its number format, such as `bfloat16`.
    #[serde(deserialize_with = "capped_text::deserialize")]
    pub dtype: String,
    /// Pages that the device has room for, or as many as the settings asked for.
    pub num_pages: u32,
    /// One page over all layers of this rank.
    pub page_bytes: u64,
    /// Weights of this rank.
    pub weight_bytes: u64,
    /// Page kinds after the first, which the fields above describe; left out while it and the fields after it are empty.
    #[serde(default)]
    pub other_kinds: Vec<PageKind>,
    /// Sizes of the CUDA graphs that the worker captures; left out while it is empty, and there is no `slot_state`.
    #[serde(default)]
    pub graphs: Vec<CapturedSize>,
    /// What the model keeps for each slot beside its pages; left out if it keeps nothing.
    #[serde(default)]
    pub slot_state: Option<SlotState>,
}

impl Serialize for Hello {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let has_slot_state = self.slot_state.is_some();
        let has_graphs = has_slot_state || !self.graphs.is_empty();
        let has_kinds = has_graphs || !self.other_kinds.is_empty();
        let num_optional = [has_kinds, has_graphs, has_slot_state];
        let num_fields = 11
            + num_optional
                .into_iter()
                .filter(|is_there| *is_there)
                .count();
        let mut fields = serializer.serialize_struct("Hello", num_fields)?;
        fields.serialize_field("protocol", &self.protocol)?;
        fields.serialize_field("schema", Bytes::new(&self.schema))?;
        fields.serialize_field("config", Bytes::new(&self.config))?;
        fields.serialize_field("rank", &self.rank)?;
        fields.serialize_field("world", &self.world)?;
        fields.serialize_field("pid", &self.pid)?;
        fields.serialize_field("device", cut(&self.device, MAX_TEXT_BYTES))?;
        fields.serialize_field("dtype", cut(&self.dtype, MAX_TEXT_BYTES))?;
        fields.serialize_field("num_pages", &self.num_pages)?;
        fields.serialize_field("page_bytes", &self.page_bytes)?;
        fields.serialize_field("weight_bytes", &self.weight_bytes)?;
        if has_kinds {
            fields.serialize_field("other_kinds", &self.other_kinds)?;
        }
        if has_graphs {
            fields.serialize_field("graphs", &self.graphs)?;
        }
        if has_slot_state {
            fields.serialize_field("slot_state", &self.slot_state)?;
        }
        fields.end()
    }
}

/// What fits into a captured CUDA graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CapturedSize {
    /// Tokens of prefill rows.
    pub prompt_tokens: u32,
    /// Prefill rows; the last is never used.
    pub prompt_rows: u32,
    /// Decode rows.
    pub decode_rows: u32,
    /// Cached tokens of all prefill rows, if their attention is planned before each replay.
    pub context_tokens: Option<u32>,
}

/// Pages of one kind: what one group of layers caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageKind {
    /// Tokens in a page.
    pub page_size: u32,
    /// Pages of the pool.
    pub num_pages: u32,
    /// One page over all layers of this kind.
    pub page_bytes: u64,
}

/// All ranks said Hello: what the worker must allocate.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Welcome {
    /// Rows of the slot tables.
    pub num_slots: u32,
    /// Pages of the pool: the least that any rank has room for.
    pub num_pages: u32,
    /// Tokens that a plan computes at most.
    pub max_batch_tokens: u32,
    /// Rows that a plan has at most.
    pub max_rows: u32,
    /// The worker's replica in its group.
    pub replica: u32,
    /// Replicas of the group.
    pub num_replicas: u32,
    /// Plans that may be in flight.
    pub credit: u32,
    /// Page kinds after the first, with the least pages of all ranks; left out while it is empty and there are no snapshots.
    #[serde(default)]
    pub other_kinds: Vec<PageKind>,
    /// Snapshots of slot state: the least that any rank has room for; left out while it is 0.
    #[serde(default)]
    pub num_snapshots: u32,
}

impl Serialize for Welcome {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let has_snapshots = self.num_snapshots > 0;
        let has_kinds = has_snapshots || !self.other_kinds.is_empty();
        let num_fields = 7 + usize::from(has_kinds) + usize::from(has_snapshots);
        let mut fields = serializer.serialize_struct("Welcome", num_fields)?;
        fields.serialize_field("num_slots", &self.num_slots)?;
        fields.serialize_field("num_pages", &self.num_pages)?;
        fields.serialize_field("max_batch_tokens", &self.max_batch_tokens)?;
        fields.serialize_field("max_rows", &self.max_rows)?;
        fields.serialize_field("replica", &self.replica)?;
        fields.serialize_field("num_replicas", &self.num_replicas)?;
        fields.serialize_field("credit", &self.credit)?;
        if has_kinds {
            fields.serialize_field("other_kinds", &self.other_kinds)?;
        }
        if has_snapshots {
            fields.serialize_field("num_snapshots", &self.num_snapshots)?;
        }
        fields.end()
    }
}

/// What a replica would do in a step of its group.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Vote {
    /// Whose vote.
    pub replica: u32,
    /// For which step.
    pub step: u64,
    /// Tokens of its prefill rows.
    pub num_prefill_tokens: u32,
    /// Its decode rows.
    pub num_decode_rows: u32,
    /// Tokens that it would compute.
    pub num_tokens: u32,
    /// Prefill and decode may share the step.
    pub wants_mixed: bool,
    /// Its step could run as a captured graph.
    pub can_graph: bool,
    /// It has nothing to do.
    pub idle: bool,
    /// It takes no new requests.
    pub draining: bool,
    /// Its prefill rows; left out while there are none and `graphs` is empty.
    #[serde(default)]
    pub prompts: Option<PromptCounts>,
    /// In a first vote the sizes that all ranks of its engine capture; left out while it is empty.
    #[serde(default)]
    pub graphs: Vec<CapturedSize>,
}

impl Serialize for Vote {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let has_graphs = !self.graphs.is_empty();
        let has_prompts = has_graphs || self.prompts.is_some();
        let num_fields = 9 + usize::from(has_prompts) + usize::from(has_graphs);
        let mut fields = serializer.serialize_struct("Vote", num_fields)?;
        fields.serialize_field("replica", &self.replica)?;
        fields.serialize_field("step", &self.step)?;
        fields.serialize_field("num_prefill_tokens", &self.num_prefill_tokens)?;
        fields.serialize_field("num_decode_rows", &self.num_decode_rows)?;
        fields.serialize_field("num_tokens", &self.num_tokens)?;
        fields.serialize_field("wants_mixed", &self.wants_mixed)?;
        fields.serialize_field("can_graph", &self.can_graph)?;
        fields.serialize_field("idle", &self.idle)?;
        fields.serialize_field("draining", &self.draining)?;
        if has_prompts {
            fields.serialize_field("prompts", &self.prompts)?;
        }
        if has_graphs {
            fields.serialize_field("graphs", &self.graphs)?;
        }
        fields.end()
    }
}

/// What choosing a captured step must know of a replica's prefill rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PromptCounts {
    /// How many.
    pub num_rows: u32,
    /// Cached tokens that they attend to.
    pub num_context_tokens: u32,
}

/// What the group does in a step: a pure function of its votes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decision {
    /// Which step.
    pub step: u64,
    /// Which rows the group has in it.
    pub mode: Mode,
    /// The most tokens of a replica, or those of the graphs.
    pub pad_tokens: u32,
    /// Tokens of the captured graphs that the replicas run, if some fit.
    pub graph_bucket: Option<u32>,
    /// Bitmap: replica i, bit `i % 8` of byte `i / 8`, has nothing to do and runs a dummy row.
    #[serde(with = "serde_bytes")]
    pub dummy_replicas: Vec<u8>,
    /// All replicas are idle and one drains: the group ends.
    pub stop: bool,
    /// A replica drains: no replica takes new requests.
    pub draining: bool,
    /// Little-endian u32s, the prompt tokens and all tokens of each replica in order; left out while all are idle.
    #[serde(default, skip_serializing_if = "Vec::is_empty", with = "serde_bytes")]
    pub tokens: Vec<u8>,
}

/// Row kinds of a group's step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "u32", try_from = "u32")]
pub enum Mode {
    /// No rows.
    Idle = 0,
    /// Prefill rows only.
    Prefill = 1,
    /// Decode rows only.
    Decode = 2,
    /// Both.
    Mixed = 3,
}

impl From<Mode> for u32 {
    fn from(mode: Mode) -> Self {
        mode as Self
    }
}

impl TryFrom<u32> for Mode {
    type Error = String;

    fn try_from(number: u32) -> Result<Self, String> {
        match number {
            0 => Ok(Self::Idle),
            1 => Ok(Self::Prefill),
            2 => Ok(Self::Decode),
            3 => Ok(Self::Mixed),
            _ => Err(format!("mode is {number}; 0 to 3 are known")),
        }
    }
}

/// No plan follows: finish, say [`Bye`], exit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Drain {}

/// The worker's link is alive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heartbeat {
    /// Whose heartbeat.
    pub rank: u32,
    /// The last step finished.
    pub step: u64,
}

/// The device has finished the forward of a step that awaits masks, and they are not here. From the replica's first
/// rank; the answer is the step's last masks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForwardDone {
    /// Which step.
    pub step: u64,
}

/// The sender gives up (a worker, an engine of a group), or rejects the receiver (the engine).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fail {
    /// The worker concerned; in a group, the engine.
    pub rank: u32,
    /// The code with which the worker exits.
    pub code: ExitCode,
    /// What went wrong and what to do, for people.
    #[serde(with = "capped_text")]
    pub reason: String,
}

/// What a process ends with when it fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "u32", try_from = "u32")]
pub enum ExitCode {
    /// Anything unforeseen.
    Bug = 1,
    /// Settings that cannot be served.
    Settings = 2,
    /// Hardware is missing, or memory.
    Hardware = 3,
    /// Model files are missing, broken or unknown.
    ModelFiles = 4,
    /// A rank or a node is gone.
    RankLost = 5,
}

impl From<ExitCode> for u32 {
    fn from(code: ExitCode) -> Self {
        code as Self
    }
}

impl TryFrom<u32> for ExitCode {
    type Error = String;

    fn try_from(number: u32) -> Result<Self, String> {
        match number {
            1 => Ok(Self::Bug),
            2 => Ok(Self::Settings),
            3 => Ok(Self::Hardware),
            4 => Ok(Self::ModelFiles),
            5 => Ok(Self::RankLost),
            _ => Err(format!("code is {number}; 1 to 5 are known")),
        }
    }
}

/// The worker has drained and exits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bye {
    /// Who leaves.
    pub rank: u32,
    /// Steps that it ran.
    pub num_steps: u64,
}

/// An engine asks the group's coordinator to let it join.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Join {
    /// [`PROTOCOL`] of the engine.
    pub protocol: u32,
    /// [`crate::schema_fingerprint`] of the engine.
    #[serde(with = "serde_bytes")]
    pub schema: Fingerprint,
    /// Fingerprint of everything that all engines of the group must share.
    #[serde(with = "serde_bytes")]
    pub config: Fingerprint,
    /// Which engine of the group it is.
    pub engine: u32,
    /// Engines of the group, from its settings.
    pub num_engines: u32,
    /// The first of its replicas.
    pub first_replica: u32,
    /// Its replicas.
    pub num_replicas: u32,
    /// What `config` is the fingerprint of, for people.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub facts: Vec<Fact>,
}

/// Something that all engines of a group must share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fact {
    /// A flag, or what it is in words.
    #[serde(with = "capped_text")]
    pub name: String,
    /// In words.
    #[serde(with = "capped_text")]
    pub value: String,
}

/// A rank uses the store in which the ranks of its replica, or of its group, find each other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreRequest {
    /// Who asks.
    pub rank: u32,
    /// Chosen by the rank; the reply has it too.
    pub id: u64,
    /// The store is that of all ranks of the group, not of the rank's replica.
    pub of_group: bool,
    /// What to do.
    pub operation: StoreOperation,
    /// Of the value.
    #[serde(with = "capped_text")]
    pub key: String,
    /// What to set, or a little-endian i64 to add; empty otherwise.
    #[serde(with = "serde_bytes")]
    pub value: Vec<u8>,
}

/// What is done with a key of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "u32", try_from = "u32")]
pub enum StoreOperation {
    /// Sets the value.
    Set = 0,
    /// Adds to a number, which is 0 before; the reply has the sum in decimal digits.
    Add = 1,
    /// The reply comes once the key has a value.
    Get = 2,
    /// The reply comes at once.
    Find = 3,
}

impl From<StoreOperation> for u32 {
    fn from(operation: StoreOperation) -> Self {
        operation as Self
    }
}

impl TryFrom<u32> for StoreOperation {
    type Error = String;

    fn try_from(number: u32) -> Result<Self, String> {
        match number {
            0 => Ok(Self::Set),
            1 => Ok(Self::Add),
            2 => Ok(Self::Get),
            3 => Ok(Self::Find),
            _ => Err(format!("operation is {number}; 0 to 3 are known")),
        }
    }
}

/// The answer to a [`StoreRequest`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreReply {
    /// Who asked.
    pub rank: u32,
    /// Of the request.
    pub id: u64,
    /// What the key has now, if anything.
    #[serde(with = "serde_bytes")]
    pub value: Option<Vec<u8>>,
}
