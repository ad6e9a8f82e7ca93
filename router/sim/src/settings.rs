//! What a simulation is told, and what follows from it.

use std::path::{Path, PathBuf};

use plait_core::{HashSeed, Micros, Policy, Settings as SchedulerSettings};
use serde::Deserialize;

use crate::clock::micros;
use crate::cost::{CostModel, Roofline, fit};
use crate::error::SimError;
use crate::hardware::Hardware;
use crate::model::ModelCost;
use crate::trace::{self, Arrival, Poisson};

/// The JSON of `plait.simulate.settings.SimulatorSettings`; defaults live there.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// What arrives.
    pub load: Load,
    /// Where it is served.
    pub cluster: Cluster,
    /// How each replica schedules.
    pub scheduler: Scheduling,
}

/// What arrives.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Load {
    /// A trace file, or synthetic arrivals.
    pub source: Source,
    /// How many times as fast the arrivals come.
    pub rate_scale: f64,
}

/// Where arrivals come from.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// A trace file.
    Trace(PathBuf),
    /// Synthetic arrivals.
    Poisson(Poisson),
}

/// Where requests are served.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cluster {
    /// Replicas that requests are shared among.
    pub replicas: u32,
    /// Which of them a request goes to.
    pub routing: Routing,
    /// A built-in name, a file of rates, or a run's step records (`.jsonl`).
    pub hardware: String,
    /// A built-in name or a `config.json`.
    pub model: String,
    /// Accelerators of one replica; None takes the fewest, in powers of two, that hold the weights.
    pub tp: Option<u32>,
    /// Share of their memory for weights and pages.
    pub memory_fraction: f64,
    /// Threads that simulate; None takes the machine's.
    pub threads: Option<u32>,
}

/// Which replica a request goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Routing {
    /// One after the other.
    InTurn,
    /// The one with the fewest requests that are not answered yet; of equals the one that got fewer so far.
    LeastLoaded,
}

/// How a replica schedules; see [`plait_core::Settings`].
// budget: one field for each setting of the scheduler
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scheduling {
    /// Tokens of one plan.
    pub max_batch_tokens: u32,
    /// Requests that run at a time, and rows of one plan.
    pub max_seqs: u32,
    /// Cap of one request's chunk; None takes `max_batch_tokens`.
    pub long_prefill_token_threshold: Option<u32>,
    /// Tokens in a page.
    pub page_size: u32,
    /// Pages in the pool; None takes what the memory holds.
    pub num_pages: Option<u32>,
    /// Longest prompt plus output; None takes the model's.
    pub max_model_len: Option<u32>,
    /// Prefill and decode rows share a step.
    pub mixed: bool,
    /// Prompts find the pages that earlier ones computed.
    pub prefix_cache: bool,
    /// Pages kept free at admission; None takes a hundredth of the pool.
    pub watermark: Option<u32>,
    /// Plans without a row after which the oldest prefill comes first.
    pub prefill_starvation_steps: u32,
    /// How long a step that decodes should take.
    pub itl_target_ms: Option<f64>,
    /// Requests that may wait.
    pub max_queue: u32,
    /// Prompt tokens that may wait.
    pub max_queue_tokens: u64,
    /// Plan a step while the one before it runs.
    pub overlap: bool,
}

/// Everything that a simulation needs, checked.
#[derive(Clone, Debug)]
pub struct Setup {
    /// In the order of their times.
    pub arrivals: Vec<Arrival>,
    /// The time of any step.
    pub cost: CostModel,
    /// Of each replica.
    pub scheduler: SchedulerSettings,
    /// Steps that may be on the wire.
    pub credit: usize,
    /// Replicas.
    pub num_replicas: u32,
    /// Which of them a request goes to.
    pub routing: Routing,
    /// Threads that simulate.
    pub num_threads: usize,
}

/// Any: nobody chooses tokens here so that their hashes meet.
const HASH_SEED: HashSeed = HashSeed([0, 0]);
/// Replicas of one simulation at most.
const MAX_REPLICAS: u32 = 1024;
/// Accelerators of one replica at most.
const MAX_GPUS: u32 = 64;
/// Rate scales are allowed from its inverse on.
const MAX_RATE_SCALE: f64 = 1e6;
/// Longest target of a step, in milliseconds: more bounds nothing.
const MAX_ITL_TARGET_MS: f64 = 60_000.0;

impl Settings {
    /// Reads the JSON.
    pub fn parse(json: &[u8]) -> Result<Self, SimError> {
        serde_json::from_slice(json)
            .map_err(|error| SimError::setting("settings", &"not valid", error.to_string()))
    }

    /// Reads what the settings name, and checks that it fits together.
    pub fn set_up(&self) -> Result<Setup, SimError> {
        self.check()?;
        let device = self.cluster.device()?;
        let scheduler = self.scheduler.resolve(&device)?;
        // Finds what no request could run with before the trace is read.
        plait_core::Scheduler::new(scheduler.clone())?;
        Ok(Setup {
            arrivals: self.load.arrivals()?,
            cost: device.cost,
            scheduler,
            credit: if self.scheduler.overlap { 2 } else { 1 },
            num_replicas: self.cluster.replicas,
            routing: self.cluster.routing,
            num_threads: self.cluster.num_threads()?,
        })
    }

    fn check(&self) -> Result<(), SimError> {
        let Cluster {
            replicas,
            memory_fraction,
            ..
        } = &self.cluster;
        if !(1..=MAX_REPLICAS).contains(replicas) {
            let allowed = format!("allowed: 1 to {MAX_REPLICAS}");
            return Err(SimError::setting("--replicas", replicas, allowed));
        }
        if !(*memory_fraction > 0.0 && *memory_fraction <= 1.0) {
            let allowed = "allowed: over 0 and up to 1";
            return Err(SimError::setting(
                "--memory-fraction",
                memory_fraction,
                allowed,
            ));
        }
        let scale = self.load.rate_scale;
        if !(1.0 / MAX_RATE_SCALE..=MAX_RATE_SCALE).contains(&scale) {
            let allowed = format!("allowed: {} to {MAX_RATE_SCALE}", 1.0 / MAX_RATE_SCALE);
            return Err(SimError::setting("--rate-scale", &scale, allowed));
        }
        Ok(())
    }
}

impl Setup {
    /// When the last request arrives.
    pub fn last_arrival(&self) -> Micros {
        self.arrivals.last().map_or(Micros(0), |arrival| arrival.at)
    }
}

impl Load {
    fn arrivals(&self) -> Result<Vec<Arrival>, SimError> {
        let mut arrivals = match &self.source {
            Source::Trace(path) => trace::read(path)?,
            Source::Poisson(poisson) => poisson.arrivals()?,
        };
        trace::speed_up(&mut arrivals, self.rate_scale);
        Ok(arrivals)
    }
}

/// A replica's cost, and what it has room for where that is known.
struct Device {
    cost: CostModel,
    room: Option<Room>,
}

struct Room {
    /// Tokens of KV.
    num_tokens: f64,
    max_model_len: u32,
}

impl Cluster {
    /// Replicas are divided among threads where none of them needs to know of another.
    fn num_threads(&self) -> Result<usize, SimError> {
        match (self.routing, self.threads) {
            (Routing::LeastLoaded, Some(asked)) if asked > 1 => {
                let allowed =
                    "1 with --routing least-loaded, which looks at all replicas for each request";
                Err(SimError::setting("--threads", &asked, allowed))
            }
            (Routing::LeastLoaded, _) => Ok(1),
            (Routing::InTurn, asked) => {
                let machine = || std::thread::available_parallelism().map_or(1, usize::from);
                let asked = asked.map_or_else(machine, |threads| threads as usize);
                Ok(asked.clamp(1, self.replicas as usize))
            }
        }
    }

    fn device(&self) -> Result<Device, SimError> {
        let hardware = Path::new(&self.hardware);
        if hardware.extension().is_some_and(|ending| ending == "jsonl") {
            let cost = CostModel::Fitted(Box::new(fit(hardware)?));
            return Ok(Device { cost, room: None });
        }
        let (hardware, model) = (
            Hardware::named(&self.hardware)?,
            ModelCost::named(&self.model)?,
        );
        let num_gpus = self.num_gpus(&hardware, &model)?;
        let room = Room {
            num_tokens: self.kv_bytes(&hardware, &model, num_gpus)? / model.kv_bytes_per_token,
            max_model_len: model.max_model_len,
        };
        Ok(Device {
            cost: CostModel::Roofline(Box::new(Roofline::new(hardware, model, num_gpus))),
            room: Some(room),
        })
    }

    /// As asked, or the fewest whose memory the weights fill to four fifths at most.
    fn num_gpus(&self, hardware: &Hardware, model: &ModelCost) -> Result<u32, SimError> {
        const FULL: f64 = 0.8;
        if let Some(asked) = self.tp {
            if (1..=MAX_GPUS).contains(&asked) {
                return Ok(asked);
            }
            return Err(SimError::setting(
                "--tp",
                &asked,
                format!("allowed: 1 to {MAX_GPUS}"),
            ));
        }
        let weights = model.num_parameters() * model.weight_bytes;
        let usable = hardware.memory_bytes * self.memory_fraction * FULL;
        let fits = |num_gpus: &u32| usable * f64::from(*num_gpus) >= weights;
        let mut powers = (0..=MAX_GPUS.ilog2()).map(|exponent| 1 << exponent);
        powers.find(fits).ok_or_else(|| {
            let allowed = format!("its weights do not fit {MAX_GPUS} of {}", hardware.name);
            SimError::setting("--model", &self.model, allowed)
        })
    }

    fn kv_bytes(
        &self,
        hardware: &Hardware,
        model: &ModelCost,
        num_gpus: u32,
    ) -> Result<f64, SimError> {
        let weights = model.num_parameters() * model.weight_bytes;
        let usable = hardware.memory_bytes * self.memory_fraction * f64::from(num_gpus);
        if usable > weights {
            return Ok(usable - weights);
        }
        let allowed = format!(
            "the weights take {:.1} GB, the replica has {:.1} GB for them and the pages; raise it or --memory-fraction",
            weights / 1e9,
            usable / 1e9
        );
        Err(SimError::setting("--tp", &num_gpus, allowed))
    }
}

impl Scheduling {
    fn resolve(&self, device: &Device) -> Result<SchedulerSettings, SimError> {
        let num_pages = self.num_pages(device)?;
        Ok(SchedulerSettings {
            max_batch_tokens: self.max_batch_tokens,
            max_rows: self.max_seqs,
            max_seqs: self.max_seqs,
            long_prefill_token_threshold: self
                .long_prefill_token_threshold
                .unwrap_or(self.max_batch_tokens),
            page_size: self.page_size,
            num_pages,
            max_model_len: self.max_model_len(device)?,
            draft_width: 0,
            policy: Policy::Fcfs,
            mixed: self.mixed,
            prefix_cache: self.prefix_cache.then_some(HASH_SEED),
            watermark: self
                .watermark
                .unwrap_or((num_pages / 100).max(1).min(num_pages.saturating_sub(1))),
            prefill_starvation_steps: self.prefill_starvation_steps,
            itl_target: self.itl_target()?,
            max_queue: self.max_queue,
            max_queue_tokens: self.max_queue_tokens,
        })
    }

    fn num_pages(&self, device: &Device) -> Result<u32, SimError> {
        match (self.num_pages, &device.room) {
            (Some(asked), _) => Ok(asked),
            #[expect(
                clippy::cast_sign_loss,
                reason = "room is positive, and the cast saturates"
            )]
            (None, Some(room)) => Ok((room.num_tokens / f64::from(self.page_size)) as u32),
            (None, None) => Err(not_in_records("--num-pages")),
        }
    }

    fn max_model_len(&self, device: &Device) -> Result<u32, SimError> {
        let known = device.room.as_ref().map(|room| room.max_model_len);
        self.max_model_len
            .or(known)
            .ok_or_else(|| not_in_records("--max-model-len"))
    }

    fn itl_target(&self) -> Result<Option<Micros>, SimError> {
        match self.itl_target_ms {
            Some(target) if !(target > 0.0 && target <= MAX_ITL_TARGET_MS) => {
                let allowed = format!("allowed: over 0 and up to {MAX_ITL_TARGET_MS}");
                Err(SimError::setting("--itl-target-ms", &target, allowed))
            }
            target => Ok(target.map(|target| micros(target * 1000.0).max(Micros(1)))),
        }
    }
}

fn not_in_records(setting: &str) -> SimError {
    let allowed = "step records do not tell it; give it";
    SimError::setting(setting, &"not given", allowed)
}
