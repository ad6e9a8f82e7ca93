//! What the command line hands to the engine, once, at start-up.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use plait_core::{HashSeed, PageSettings, PoolSize, RuntimeSettings, SchedulerSettings};
use plait_proto::Fact;
use plait_text::{ChosenFormats, ModelText, RESERVED_NAMES, ReasoningFormat, ToolFormat};
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::deadlines::DeadlineSettings;
use crate::engine::StartError;
use crate::generation_settings::GenerationSettings;
use crate::group::{
    CapturedGraphs, ClientKeys, GroupProblem, GroupSettings, GroupTimeouts, Key, MAX_REPLICAS,
    Role, ServerKeys,
};
use crate::kv_events::KvEventsSettings;
use crate::remote_workers::RemoteWorkers;
use crate::replica_pools::ReplicaPools;
use crate::request_seeds::hash_seed;

/// The JSON of `plait.settings.EngineSettings`; defaults live there, beside their docstrings.
// budget: one JSON object with everything that the engine is told
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EngineSettings {
    /// Folder or GGUF file of the model.
    pub model: PathBuf,
    /// The name that requests give; None takes the folder's or file's.
    pub served_model_name: Option<String>,
    /// Chat template in place of the model's own, and its variables.
    #[serde(default)]
    pub template: TemplateSettings,
    /// Directory of mode 0700 for the ipc socket.
    pub run_dir: PathBuf,
    /// Worker processes of each replica.
    pub num_ranks: u32,
    /// Replicas of the engine.
    pub num_replicas: u32,
    /// Longest prompt plus output in tokens; None takes the model's own.
    pub max_model_len: Option<u32>,
    /// How requests become steps.
    pub scheduler: SchedulerSettings,
    /// The KV pages.
    pub pages: PageSettings,
    /// Speculative tokens of a decode row at most; the worker's configuration has the same number.
    pub draft_tokens: u32,
    /// Threads that tokenise.
    pub text_threads: u32,
    /// Seeds the generator of seeds for requests that give none; None takes the system's randomness.
    pub seed: Option<u64>,
    /// File for the step trace: the work and time of each step. None writes none.
    pub step_trace: Option<PathBuf>,
    /// Longest time until all ranks have loaded.
    pub load_timeout_seconds: f64,
    /// Of that, the longest time from the last rank's weights to its first step.
    pub capture_timeout_seconds: f64,
    /// `debug`, `info`, `warning` or `error`.
    pub log_level: LogLevel,
    /// Log lines are JSON objects.
    #[serde(default)]
    pub log_json: bool,
    /// Engines that step together with this one; None steps freely.
    pub group: Option<GroupMembership>,
    /// A replica that loses its ranks waits for others.
    #[serde(default)]
    pub restarts_ranks: bool,
    /// Ranks on other hosts; None: all are on this one.
    pub remote_workers: Option<RemoteWorkers>,
    /// Where to publish which pages are cached.
    pub kv_events: Option<KvEventsSettings>,
    /// Key of the pages' hashes; None draws one.
    pub hash_key: Option<HashKey>,
    /// Where sampling defaults come from.
    #[serde(default)]
    pub generation: GenerationSettings,
    /// How long requests may take.
    #[serde(default)]
    pub deadlines: DeadlineSettings,
}

/// The JSON of `plait.settings.TemplateSettings`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TemplateSettings {
    /// File with a Jinja template; None takes the model's own.
    pub chat_template: Option<PathBuf>,
    /// JSON object of variables.
    pub chat_template_kwargs: Option<String>,
    /// How the model writes tool calls; None: as the template shows.
    pub tool_parser: Option<String>,
    /// How the model writes thoughts; None: as the template shows.
    pub reasoning_parser: Option<String>,
    /// Whether chats may have tools.
    pub enable_auto_tool_choice: bool,
}

impl Default for TemplateSettings {
    fn default() -> Self {
        Self {
            chat_template: None,
            chat_template_kwargs: None,
            tool_parser: None,
            reasoning_parser: None,
            enable_auto_tool_choice: true,
        }
    }
}

impl TemplateSettings {
    /// The model with this template and these variables.
    pub fn apply(&self, mut model: ModelText) -> Result<ModelText, StartError> {
        if let Some(path) = &self.chat_template {
            model = model.with_template_file(path)?;
        }
        model = model.with_formats(self.formats()?);
        match &self.chat_template_kwargs {
            Some(json) => Ok(model.with_template_kwargs(template_kwargs(json)?)),
            None => Ok(model),
        }
    }
}

impl TemplateSettings {
    /// The parsers that are named.
    fn formats(&self) -> Result<ChosenFormats, SettingsProblem> {
        let tools = match self.enable_auto_tool_choice {
            false => Some(None),
            true => chosen(
                ("--tool-parser", self.tool_parser.as_deref()),
                ToolFormat::named,
                ToolFormat::all().iter().map(|format| format.names[0]),
            )?,
        };
        let reasoning = chosen(
            ("--reasoning-parser", self.reasoning_parser.as_deref()),
            ReasoningFormat::named,
            ReasoningFormat::all().iter().map(|format| format.names[0]),
        )?;
        Ok(ChosenFormats { reasoning, tools })
    }
}

/// The format of this name, if a flag gives one; `none` is no format.
fn chosen<T>(
    (flag, name): (&'static str, Option<&str>),
    named: impl Fn(&str) -> Option<&'static T>,
    all: impl Iterator<Item = &'static str>,
) -> Result<Option<Option<&'static T>>, SettingsProblem> {
    match name {
        None => Ok(None),
        Some("none") => Ok(Some(None)),
        Some(name) => match named(name) {
            Some(format) => Ok(Some(Some(format))),
            None => Err(SettingsProblem::Parser {
                flag,
                given: name.to_owned(),
                allowed: all.collect::<Vec<_>>().join(", "),
            }),
        },
    }
}

fn template_kwargs(json: &str) -> Result<Map<String, Value>, SettingsProblem> {
    let problem = |problem| SettingsProblem::TemplateKwargs(json.to_owned(), problem);
    let kwargs: Map<String, Value> =
        serde_json::from_str(json).map_err(|error| problem(error.to_string()))?;
    let mut names = kwargs.keys();
    match names.find(|name| RESERVED_NAMES.contains(&name.as_str())) {
        Some(name) => Err(problem(format!("only the server sets `{name}`"))),
        None => Ok(kwargs),
    }
}

/// A key for hashes of pages: 32 hexadecimal digits.
#[derive(Clone, Copy, Deserialize)]
#[serde(try_from = "String")]
pub struct HashKey(HashSeed);

impl HashKey {
    /// A random one.
    pub fn draw() -> Self {
        Self(hash_seed())
    }

    /// What pages are hashed with.
    pub fn seed(self) -> HashSeed {
        self.0
    }

    /// Equal for equal keys.
    pub fn id(self) -> String {
        format!("{:?}", self.0.id())
    }
}

impl TryFrom<String> for HashKey {
    type Error = &'static str;

    fn try_from(digits: String) -> Result<Self, Self::Error> {
        let half = |range| {
            digits
                .get(range)
                .and_then(|half| u64::from_str_radix(half, 16).ok())
        };
        match (digits.len(), half(0..16), half(16..32)) {
            (32, Some(first), Some(second)) => Ok(Self(HashSeed([first, second]))),
            _ => Err("hash_key is not 32 hexadecimal digits"),
        }
    }
}

// Keys stay out of logs.
impl std::fmt::Debug for HashKey {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        to.write_str("HashKey")
    }
}

/// The JSON of `plait.settings.GroupMembership`: this engine in its group. Its engines have equally many replicas.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GroupMembership {
    /// Which engine of the group this is; 0 listens, the others dial it.
    pub engine: u32,
    /// Engines of the group.
    pub num_engines: u32,
    /// Where engine 0 listens: an `ipc://` path in a directory of mode 0700, or any ZeroMQ address with keys.
    pub endpoint: String,
    /// This engine's CURVE keys.
    pub keys: Option<GroupKeys>,
    /// Model, number formats and layout: what all engines must share, by the name that a message shows.
    pub facts: BTreeMap<String, String>,
}

/// CURVE keys in Z85, 40 characters each.
#[derive(Clone, Deserialize)]
#[serde(tag = "of", rename_all = "lowercase", deny_unknown_fields)]
pub enum GroupKeys {
    /// Of engine 0.
    Coordinator {
        /// Its own.
        secret: String,
        /// Public keys of engine 1, 2 and so on.
        allowed: Vec<String>,
    },
    /// Of any other engine.
    Member {
        /// Engine 0's public key.
        server: String,
        /// Its own.
        public: String,
        /// Its own.
        secret: String,
    },
}

// Secrets stay out of logs.
impl std::fmt::Debug for GroupKeys {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        to.write_str("GroupKeys")
    }
}

impl GroupMembership {
    /// The group's settings, with so many replicas an engine. `facts` are what all engines must share, `max_tokens` the most tokens of a step.
    pub fn group(
        &self,
        num_replicas: u32,
        max_tokens: u32,
        facts: Vec<Fact>,
        timeouts: GroupTimeouts,
    ) -> Result<GroupSettings, GroupProblem> {
        if self.num_engines > MAX_REPLICAS {
            let given = vec![self.num_engines];
            return Err(GroupProblem::Replicas { given });
        }
        Ok(GroupSettings {
            role: self.role()?,
            num_replicas: vec![num_replicas; self.num_engines as usize],
            config: fingerprint(&facts),
            facts,
            graphs: CapturedGraphs::default(),
            max_tokens,
            timeouts,
        })
    }

    fn role(&self) -> Result<Role, GroupProblem> {
        let endpoint = self.endpoint.clone();
        let whose = "group.keys";
        match (self.engine, self.num_engines, &self.keys) {
            (0, 1, None) => Ok(Role::Alone),
            (0, _, None) => Ok(Role::Coordinator {
                endpoint,
                keys: None,
            }),
            (0, _, Some(GroupKeys::Coordinator { secret, allowed })) => Ok(Role::Coordinator {
                endpoint,
                keys: Some(ServerKeys {
                    secret: key(secret, "group.keys.secret")?,
                    allowed: allowed
                        .iter()
                        .map(|allowed| key(allowed, "group.keys.allowed"))
                        .collect::<Result<_, _>>()?,
                }),
            }),
            (engine, _, None) => Ok(Role::Member {
                engine,
                endpoint,
                keys: None,
            }),
            (
                1..,
                _,
                Some(GroupKeys::Member {
                    server,
                    public,
                    secret,
                }),
            ) => Ok(Role::Member {
                engine: self.engine,
                endpoint,
                keys: Some(ClientKeys {
                    server: key(server, "group.keys.server")?,
                    public: key(public, "group.keys.public")?,
                    secret: key(secret, "group.keys.secret")?,
                }),
            }),
            _ => Err(GroupProblem::Key { whose }),
        }
    }
}

/// A CURVE key in Z85.
pub(crate) fn key(z85: &str, whose: &'static str) -> Result<Key, GroupProblem> {
    let bytes = zmq::z85_decode(z85).ok();
    bytes
        .and_then(|bytes| Key::try_from(bytes).ok())
        .ok_or(GroupProblem::Key { whose })
}

/// How much goes to stderr.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogLevel {
    /// Everything.
    Debug,
    /// What an operator wants to see once.
    Info,
    /// What an operator should look at.
    Warning,
    /// What ended something.
    Error,
}

/// A setting that cannot work.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SettingsProblem {
    /// Not the JSON that the engine reads.
    #[error("the engine's settings are not valid: {0}")]
    Malformed(String),
    /// Variables of the chat template that it cannot have, and why.
    #[error(
        "--chat-template-kwargs is {0:?}, where a JSON object of the template's own variables is allowed: {1}; correct it"
    )]
    TemplateKwargs(String, String),
    /// Overrides of sampling defaults that are none.
    #[error(
        "--override-generation-config is {0:?}, where a JSON object of sampling fields is allowed: {1}; correct it"
    )]
    GenerationConfig(String, String),
    /// A parser of answers that does not exist.
    #[error("{flag} is {given:?}, where {allowed} and none are allowed; name one, or leave it out")]
    Parser {
        /// The flag.
        flag: &'static str,
        /// What was given.
        given: String,
        /// Names of the parsers.
        allowed: String,
    },
    /// One value is out of range.
    #[error("--{setting} is {given}; {allowed}")]
    OutOfRange {
        /// The setting's name as users write it, without the dashes.
        setting: &'static str,
        /// What was given.
        given: u64,
        /// What is allowed, why, and what to do.
        allowed: String,
    },
}

impl From<plait_core::SettingsError> for SettingsProblem {
    fn from(error: plait_core::SettingsError) -> Self {
        Self::OutOfRange {
            setting: error.setting,
            given: error.given,
            allowed: error.allowed,
        }
    }
}

/// Ranks of one replica, and replicas of one engine, at most.
const MAX_RANKS: u32 = 64;
/// A longer time to load is none.
const LONGEST_LOAD: Duration = Duration::from_secs(1_000_000_000);

impl EngineSettings {
    /// Reads and checks the JSON.
    pub fn parse(json: &[u8]) -> Result<Self, SettingsProblem> {
        let settings: Self = serde_json::from_slice(json)
            .map_err(|error| SettingsProblem::Malformed(error.to_string()))?;
        if !(1..=MAX_RANKS).contains(&settings.num_ranks) {
            return Err(SettingsProblem::OutOfRange {
                setting: "tp",
                given: settings.num_ranks.into(),
                allowed: format!("a replica has 1 to {MAX_RANKS} ranks: give one of these"),
            });
        }
        if !(1..=MAX_RANKS).contains(&settings.num_replicas) {
            return Err(SettingsProblem::OutOfRange {
                setting: "dp",
                given: settings.num_replicas.into(),
                allowed: format!("a server has 1 to {MAX_RANKS} replicas: give one of these"),
            });
        }
        Ok(settings)
    }

    /// The limits on the start: until all ranks are ready, and of that, from the last rank's weights.
    pub fn start_timeouts(&self) -> (Duration, Duration) {
        let limit = |seconds| Duration::try_from_secs_f64(seconds).unwrap_or(LONGEST_LOAD);
        (
            limit(self.load_timeout_seconds),
            limit(self.capture_timeout_seconds),
        )
    }

    /// The longest prompt plus output: what was asked for, if the model's context holds it.
    pub fn model_len(&self, context_length: u32) -> Result<u32, SettingsProblem> {
        match self.max_model_len {
            None => Ok(context_length),
            Some(asked) if (1..=context_length).contains(&asked) => Ok(asked),
            Some(asked) => Err(SettingsProblem::OutOfRange {
                setting: "max-model-len",
                given: asked.into(),
                allowed: format!(
                    "this model's context holds 1 to {context_length} tokens: lower it, or leave it out"
                ),
            }),
        }
    }

    /// Everything that the scheduler needs, once the ranks have reported their pool.
    pub fn for_replica(&self, max_model_len: u32, pools: &ReplicaPools) -> plait_core::Settings {
        let hash_key = self.hash_key.unwrap_or_else(HashKey::draw);
        let other_kinds = pools.other_kinds.iter().map(|kind| PoolSize {
            page_size: kind.page_size,
            num_pages: kind.num_pages,
        });
        plait_core::Settings {
            scheduler: self.scheduler.clone(),
            pages: self.pages.clone(),
            runtime: RuntimeSettings {
                draft_width: self.draft_tokens,
                other_kinds: other_kinds.collect(),
                num_snapshots: pools.num_snapshots,
                ..RuntimeSettings::new(pools.num_pages, max_model_len, hash_key.0)
            },
        }
    }

    /// The number of one of this engine's replicas among all that listeners may know; None if it is the only one.
    pub fn replica_number(&self, replica: u32) -> Option<u32> {
        match &self.group {
            Some(group) => Some(group.engine * self.num_replicas + replica),
            None => (self.num_replicas > 1).then_some(replica),
        }
    }

    /// Everything that all engines of a group must share.
    pub fn group_facts(&self, max_model_len: u32, vocab_size: u32) -> Vec<Fact> {
        let (scheduler, pages) = (&self.scheduler, &self.pages);
        let own: [(&str, String); 10] = [
            ("--max-model-len", max_model_len.to_string()),
            ("tokens of the vocabulary", vocab_size.to_string()),
            ("--tp", self.num_ranks.to_string()),
            ("--dp", self.num_replicas.to_string()),
            ("--max-batch-tokens", in_words(scheduler.max_batch_tokens)),
            ("--max-seqs", in_words(scheduler.max_seqs)),
            ("--page-size", pages.page_size.to_string()),
            ("--mixed", scheduler.mixed.to_string()),
            ("--overlap", scheduler.overlap.to_string()),
            ("tokens of a draft", self.draft_tokens.to_string()),
        ];
        let given = self.group.iter().flat_map(|group| &group.facts);
        let given = given.map(|(name, value)| (name.as_str(), value.clone()));
        given
            .chain(own)
            .map(|(name, value)| Fact {
                name: name.to_owned(),
                value,
            })
            .collect()
    }
}

fn in_words(number: Option<u32>) -> String {
    number.map_or_else(|| "none".to_owned(), |number| number.to_string())
}

fn fingerprint(facts: &[Fact]) -> plait_proto::Fingerprint {
    let pairs: Vec<_> = facts.iter().map(|fact| (&fact.name, &fact.value)).collect();
    plait_proto::config_fingerprint(serde_json::json!(pairs).to_string().as_bytes())
}
