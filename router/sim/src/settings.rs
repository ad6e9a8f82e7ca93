//! Settings of a simulation, and what follows from them.

use std::path::{Path, PathBuf};

use plait_core::{HashSeed, Limits, Micros, PageSettings, RuntimeSettings, SchedulerSettings};
use serde::Deserialize;

use crate::cost::{CostModel, Roofline, fit};
use crate::error::SimError;
use crate::hardware::Hardware;
use crate::model::ModelCost;
use crate::trace::{self, Arrival, Poisson, Scenario};

/// The JSON of `plait.simulate.settings.SimulatorSettings`, which has the defaults.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// The arrivals.
    pub load: Load,
    /// The replicas.
    pub cluster: Cluster,
    /// The scheduler of each replica.
    pub scheduler: SchedulerSettings,
    /// The KV pages of each replica.
    pub pages: PageSettings,
}

/// The arrivals.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Load {
    /// A trace file, or synthetic arrivals.
    pub source: Source,
    /// Factor by which requests arrive faster.
    pub rate_scale: f64,
    /// Tenants that the requests are dealt to; None keeps those of the source.
    pub tenants: Option<u32>,
    /// Seed of the dealing.
    pub seed: u64,
}

/// Where arrivals come from.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// A trace file.
    Trace(PathBuf),
    /// Synthetic arrivals.
    Poisson(Poisson),
    /// A load that puts the policies under pressure.
    Scenario(Scenario),
}

/// The replicas.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cluster {
    /// Number of replicas.
    pub replicas: u32,
    /// How requests are routed to them.
    pub routing: Routing,
    /// A built-in name, a file of rates, or a run's step trace (`.jsonl`).
    pub hardware: String,
    /// A built-in name or a `config.json`.
    pub model: String,
    /// Accelerators per replica; None takes the smallest power of two that holds the weights.
    pub tp: Option<u32>,
    /// The replicas share their experts, and step together.
    pub dp_attention: bool,
    /// Longest prompt plus output; None takes the model's.
    pub max_model_len: Option<u32>,
    /// Threads that simulate; None takes the machine's.
    pub threads: Option<u32>,
}

/// How requests are routed to replicas.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Routing {
    /// Round-robin.
    InTurn,
    /// To the replica with the fewest unanswered requests; of equals, to the one that got fewer so far.
    LeastLoaded,
    /// As `plait serve --dp` routes: by tokens in flight and queued, less what is cached of the prompt.
    PrefixAware,
}

/// Everything that a simulation needs, checked.
#[derive(Clone, Debug)]
pub struct Setup {
    /// In order of time.
    pub arrivals: Vec<Arrival>,
    /// The time of any step.
    pub cost: CostModel,
    /// Of each replica's scheduler.
    pub scheduler: plait_core::Settings,
    /// The limits that follow from them.
    pub limits: Limits,
    /// Replicas.
    pub num_replicas: u32,
    /// How requests are routed to them.
    pub routing: Routing,
    /// The replicas share their experts, and step together.
    pub shares_experts: bool,
    /// Threads that simulate.
    pub num_threads: usize,
}

/// Any seed will do: nobody constructs colliding prompts here.
pub const HASH_SEED: HashSeed = HashSeed([0, 0]);
/// Most replicas of one simulation.
const MAX_REPLICAS: u32 = 1024;
/// Most tenants that requests are dealt to.
const MAX_TENANTS: u32 = 10_000;
/// Most accelerators of one replica.
const MAX_GPUS: u32 = 64;
/// Largest rate scale; the smallest is its inverse.
const MAX_RATE_SCALE: f64 = 1e6;

impl Settings {
    /// Reads the JSON.
    pub fn parse(json: &[u8]) -> Result<Self, SimError> {
        serde_json::from_slice(json)
            .map_err(|error| SimError::setting("settings", &"not valid", error.to_string()))
    }

    /// Reads the files that the settings name, and checks that all fits together.
    pub fn set_up(&self) -> Result<Setup, SimError> {
        self.check()?;
        let device = self.cluster.device(memory_fraction(&self.pages)?)?;
        let scheduler = self.for_replica(&device)?;
        // Rejects impossible settings before the trace is read.
        let limits = scheduler.limits()?;
        Ok(Setup {
            arrivals: self.load.arrivals()?,
            cost: device.cost,
            scheduler,
            limits,
            num_replicas: self.cluster.replicas,
            routing: self.cluster.routing,
            shares_experts: self.cluster.dp_attention,
            num_threads: self.cluster.num_threads()?,
        })
    }

    fn check(&self) -> Result<(), SimError> {
        let replicas = self.cluster.replicas;
        if !(1..=MAX_REPLICAS).contains(&replicas) {
            let allowed = format!("allowed: 1 to {MAX_REPLICAS}");
            return Err(SimError::setting("--replicas", &replicas, allowed));
        }
        let tenants = self.load.tenants.unwrap_or(1);
        if !(1..=MAX_TENANTS).contains(&tenants) {
            let allowed = format!("allowed: 1 to {MAX_TENANTS}");
            return Err(SimError::setting("--tenants", &tenants, allowed));
        }
        let scale = self.load.rate_scale;
        if !(1.0 / MAX_RATE_SCALE..=MAX_RATE_SCALE).contains(&scale) {
            let allowed = format!("allowed: {} to {MAX_RATE_SCALE}", 1.0 / MAX_RATE_SCALE);
            return Err(SimError::setting("--rate-scale", &scale, allowed));
        }
        Ok(())
    }

    fn for_replica(&self, device: &Device) -> Result<plait_core::Settings, SimError> {
        Ok(plait_core::Settings {
            scheduler: self.scheduler.clone(),
            pages: self.pages.clone(),
            runtime: RuntimeSettings {
                // No rank tells whether the model keeps slot state: it does if snapshots are asked for.
                num_snapshots: self.pages.num_snapshots,
                ..RuntimeSettings::new(
                    self.num_pages(device)?,
                    self.cluster.model_len(device)?,
                    HASH_SEED,
                )
            },
        })
    }

    fn num_pages(&self, device: &Device) -> Result<u32, SimError> {
        match (self.pages.num_pages, &device.capacity) {
            (Some(asked), _) => Ok(asked),
            #[expect(
                clippy::cast_sign_loss,
                reason = "the capacity is positive, and the cast saturates"
            )]
            (None, Some(kv)) => Ok((kv.num_tokens / f64::from(self.pages.page_size)) as u32),
            (None, None) => Err(not_in_records("--num-pages")),
        }
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
            Source::Scenario(scenario) => scenario.arrivals()?,
        };
        if let Some(tenants) = self.tenants {
            trace::deal(&mut arrivals, tenants, self.seed);
        }
        trace::speed_up(&mut arrivals, self.rate_scale);
        Ok(arrivals)
    }
}

/// A replica's cost, and its KV capacity if that is known.
struct Device {
    cost: CostModel,
    capacity: Option<KvCapacity>,
}

struct KvCapacity {
    /// Tokens of KV.
    num_tokens: f64,
    max_model_len: u32,
}

impl Cluster {
    /// Replicas share threads out only if none needs to know of another.
    fn num_threads(&self) -> Result<usize, SimError> {
        if self.dp_attention {
            return Ok(1);
        }
        match (self.routing, self.threads) {
            (Routing::InTurn, asked) => {
                let machine = || std::thread::available_parallelism().map_or(1, usize::from);
                let asked = asked.map_or_else(machine, |threads| threads as usize);
                Ok(asked.clamp(1, self.replicas as usize))
            }
            (routing, Some(asked)) if asked > 1 => {
                let name = match routing {
                    Routing::PrefixAware => "prefix-aware",
                    Routing::LeastLoaded | Routing::InTurn => "least-loaded",
                };
                let allowed = format!(
                    "1 with --routing {name}, which looks at all replicas for each request"
                );
                Err(SimError::setting("--threads", &asked, allowed))
            }
            _ => Ok(1),
        }
    }

    fn model_len(&self, device: &Device) -> Result<u32, SimError> {
        let known = device.capacity.as_ref().map(|kv| kv.max_model_len);
        let asked = self.max_model_len.or(known);
        asked.ok_or_else(|| not_in_records("--max-model-len"))
    }

    fn device(&self, memory_fraction: f64) -> Result<Device, SimError> {
        let hardware = Path::new(&self.hardware);
        if hardware.extension().is_some_and(|ending| ending == "jsonl") {
            if self.dp_attention {
                return Err(no_group("a step trace has no experts' part: give rates"));
            }
            let cost = CostModel::Fitted(Box::new(fit(hardware)?));
            return Ok(Device {
                cost,
                capacity: None,
            });
        }
        let (hardware, model) = (
            Hardware::named(&self.hardware)?,
            ModelCost::named(&self.model)?,
        );
        if self.dp_attention && model.num_experts == 0.0 {
            return Err(no_group("the model has no experts to share"));
        }
        let memory = hardware.memory_bytes * memory_fraction;
        let num_gpus = self.num_gpus(&hardware, &model, memory)?;
        let capacity = KvCapacity {
            num_tokens: kv_bytes(&model, memory, num_gpus, self.num_sharing())?
                / model.kv_bytes_per_token,
            max_model_len: model.max_model_len,
        };
        Ok(Device {
            cost: CostModel::Roofline(Box::new(Roofline::new(hardware, model, num_gpus))),
            capacity: Some(capacity),
        })
    }

    /// Replicas that share the experts.
    fn num_sharing(&self) -> u32 {
        if self.dp_attention { self.replicas } else { 1 }
    }

    /// As asked, or the fewest whose memory is at most four fifths weights.
    fn num_gpus(
        &self,
        hardware: &Hardware,
        model: &ModelCost,
        memory: f64,
    ) -> Result<u32, SimError> {
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
        let weights = model.parameters_of_replica(self.num_sharing()) * model.weight_bytes;
        let usable = memory * FULL;
        let fits = |num_gpus: &u32| usable * f64::from(*num_gpus) >= weights;
        let mut powers = (0..=MAX_GPUS.ilog2()).map(|exponent| 1 << exponent);
        powers.find(fits).ok_or_else(|| {
            let allowed = format!("its weights do not fit {MAX_GPUS} of {}", hardware.name);
            SimError::setting("--model", &self.model, allowed)
        })
    }
}

/// Share of the accelerators' memory for weights and pages.
fn memory_fraction(pages: &PageSettings) -> Result<f64, SimError> {
    let given = pages.memory_fraction.unwrap_or_default();
    if given > 0.0 && given <= 1.0 {
        return Ok(given);
    }
    let allowed = "allowed: over 0 and up to 1";
    Err(SimError::setting("--memory-fraction", &given, allowed))
}

/// Bytes that the weights leave of the replica's memory.
fn kv_bytes(
    model: &ModelCost,
    memory: f64,
    num_gpus: u32,
    num_sharing: u32,
) -> Result<f64, SimError> {
    let weights = model.parameters_of_replica(num_sharing) * model.weight_bytes;
    let usable = memory * f64::from(num_gpus);
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

fn no_group(allowed: &str) -> SimError {
    SimError::setting("--dp-attention", &"set", allowed)
}

fn not_in_records(setting: &str) -> SimError {
    let allowed = "a step trace does not have it; give it";
    SimError::setting(setting, &"not given", allowed)
}
