//! A training job with everything that a resume must restore: shuffling, accumulation, dropout, augmentation, batch
//! normalisation, a schedule, prefetching workers, two loaders, and a value of the user.

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use accelerator::checkpoint::Position;
use accelerator::metric::Mean;
use accelerator::nn::Unit;
use accelerator::optim::Scheduled;
use accelerator::plan::sample_rng_seed;
use accelerator::prelude::*;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::{Dataset, DatasetError};
use burn::lr_scheduler::step::StepLrSchedulerConfig;
use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Linear, LinearConfig};
use burn::optim::{AdamWConfig, SgdConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Int, Tensor, TensorData};
use serde::{Deserialize, Serialize};

use crate::problems::{flat, noise};

/// The settings of a job, and the files for its checkpoints and its result.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct TrainingJob {
    /// The folder of the checkpoints.
    pub checkpoints: PathBuf,
    /// The file for the [`TrainingResult`] of rank 0 as JSON; beside it, each rank writes its [`StepRecord`]s as JSON
    /// lines (`rank-N.jsonl`).
    pub result: PathBuf,
    pub epochs: u64,
    pub samples: usize,
    /// The batch size of each rank, at the world size with which the job began.
    pub batch_size: usize,
    /// The optimizer steps between two saves.
    pub save_every: u64,
    pub dropout: f64,
    pub optimizer: OptimizerKind,
    /// Continues in the same processes with another number of ranks.
    pub live: bool,
    /// Trains in f64.
    pub double: bool,
    /// The pause before each batch, so that a signal arrives while the job trains.
    pub pause_ms: u64,
    /// The signals that rank 0 sends to ranks, before any restart of the launcher.
    pub notices: Vec<Notice>,
    /// Another rank to kill, and the milliseconds between the first notice and its end.
    pub second_kill: Option<(usize, u64)>,
    /// A file that preempts the job.
    pub leave: Option<PathBuf>,
    /// The name of its run, if it has one.
    pub run: Option<String>,
    /// A deadline that preempts the job, in seconds from the start.
    pub seconds: Option<u64>,
}

/// A signal to a rank.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Notice {
    /// The signal, such as `TERM`.
    pub signal: String,
    pub rank: usize,
    pub place: Place,
}

/// A place in one attempt of a job, each counted from 0.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub enum Place {
    /// Before the backward pass of this step.
    Step(u64),
    /// During an evaluation.
    Evaluation(u64),
    /// While rank 0 writes a checkpoint, and the others wait.
    Save(u64),
    /// Before the ranks leave together, after the last step.
    End,
}

/// AdamW, or plain SGD for a job whose world size changes.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub enum OptimizerKind {
    #[default]
    AdamW,
    Sgd,
}

/// The result of a job that trained to its end.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct TrainingResult {
    /// The bits of all parameters and running statistics.
    pub parameters: Vec<u64>,
    /// The bits of the trained parameters. Running statistics are combined in each save, so their last bits depend on
    /// when the job saves.
    pub weights: Vec<u64>,
    pub steps: u64,
    /// The value of the user.
    pub history: Vec<u64>,
    /// The number of restarts of the job.
    pub restarts: u64,
    pub world_size: usize,
    /// The number of elements of parameters that rank 0 holds while it trains.
    pub held: usize,
}

/// The batch of a rank in an optimizer step, with its samples. A step that was not finished has records, too.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct StepRecord {
    pub restart: u64,
    /// The number of earlier groups of ranks in this attempt.
    pub group: u64,
    pub epoch: u64,
    /// The number of the step, from 1.
    pub step: u64,
    pub rank: usize,
    pub world_size: usize,
    pub samples: Vec<u64>,
}

/// Trains from the newest checkpoint to the end, or until a rank is preempted; returns the exit code. Continues after
/// the loss of other ranks, and with another number of ranks, if the launcher allows it.
///
/// # Errors
///
/// The errors of the library.
pub fn train(mut accelerator: Accelerator, job: &TrainingJob) -> Result<ExitCode> {
    watch(&accelerator, job)?;
    let mut group = 0;
    loop {
        let begun = Training::begin(&accelerator, job, &mut group);
        let next = match begun {
            Ok(mut training) => match training.run(&accelerator) {
                Ok(Turn::Ended(code)) => return Ok(code),
                Ok(Turn::Regroups) => match accelerator.regroup(training.parts())? {
                    Some(next) => next,
                    None => return Ok(ExitCode::SUCCESS),
                },
                Err(lost) if lost.is_peer_lost() => accelerator.recover(training.parts())?,
                Err(error) => return Err(error),
            },
            Err(lost) if lost.is_peer_lost() => accelerator.recover(())?,
            Err(error) => return Err(error),
        };
        accelerator = next;
        group += 1;
    }
}

/// Watches for what preempts the job.
fn watch(accelerator: &Accelerator, job: &TrainingJob) -> Result<()> {
    let mut preemption = Preemption::new();
    if let Some(path) = &job.leave {
        preemption = preemption.with_file(path);
    }
    if let Some(seconds) = job.seconds {
        preemption = preemption.with_deadline(SystemTime::now() + Duration::from_secs(seconds));
    }
    accelerator.on_preemption(preemption)
}

/// The reason why a program's part in a group ends.
enum Turn {
    Ended(ExitCode),
    /// The number of ranks changes.
    Regroups,
}

/// The training in one group of ranks.
struct Training<'a> {
    job: &'a TrainingJob,
    group: u64,
    notifier: Arc<Notifier>,
    checkpoints: Checkpoints,
    position: Position,
    model: Net,
    optimizer: PreparedOptimizer<Scheduled>,
    train: PreparedLoader<RowBatch>,
    valid: PreparedLoader<RowBatch>,
    history: Vec<u64>,
}

impl<'a> Training<'a> {
    /// Begins in the group with this number, which a rank that has just joined the job learns from the others.
    fn begin(accelerator: &Accelerator, job: &'a TrainingJob, group: &mut u64) -> Result<Self> {
        *group = accelerator
            .gather_object(group)?
            .into_iter()
            .fold(0, u64::max);
        let notifies = *group == 0 && accelerator.restarts() == 0;
        let notifier = Arc::new(Notifier::new(accelerator, job, notifies)?);
        let device = accelerator.device();
        let model = Net::new(&device, job.dropout);
        let optimizer = match job.optimizer {
            OptimizerKind::AdamW => AdamWConfig::new().with_weight_decay(0.01).init(),
            OptimizerKind::Sgd => SgdConfig::new().init(),
        };
        let schedule = StepLrSchedulerConfig::new(0.02, 7)
            .with_gamma(0.9)
            .init()
            .expect("a valid schedule");
        let loader = |count, seed: Option<u64>| {
            let builder = LoaderBuilder::new(RowBatcher).batch_size(job.batch_size);
            let builder = match seed {
                Some(seed) => builder.shuffle(seed).num_workers(2).prefetch(3),
                None => builder,
            };
            builder.build(Rows { count })
        };
        let (model, optimizer, train, valid) = accelerator.prepare((
            model,
            (optimizer, schedule),
            loader(job.samples, Some(11)),
            loader(job.samples / 4, None),
        ))?;

        if let Some(name) = &job.run {
            accelerator.init_trackers(name, &serde_json::json!({ "epochs": job.epochs }))?;
        }
        let saves = AtomicU64::new(0);
        let in_save = notifier.clone();
        let checkpoints = Checkpoints::new(&job.checkpoints)
            .with_total_limit(3)
            .before_save(move |_| {
                in_save.reach(Place::Save(saves.fetch_add(1, Ordering::Relaxed)));
                Ok(())
            });
        let parts = (model, optimizer, train, valid, Object(Vec::<u64>::new()));
        let (parts, position) = accelerator.resume(&checkpoints, parts)?;
        let (model, optimizer, train, valid, Object(history)) = parts;
        Ok(Self {
            job,
            group: *group,
            notifier,
            checkpoints,
            position,
            model,
            optimizer,
            train,
            valid,
            history,
        })
    }

    #[expect(
        clippy::type_complexity,
        reason = "an alias would be one more name to look up"
    )]
    fn parts(
        &self,
    ) -> (
        &Net,
        &PreparedOptimizer<Scheduled>,
        &PreparedLoader<RowBatch>,
        &PreparedLoader<RowBatch>,
        Object<&Vec<u64>>,
    ) {
        let history = Object(&self.history);
        (
            &self.model,
            &self.optimizer,
            &self.train,
            &self.valid,
            history,
        )
    }

    fn run(&mut self, accelerator: &Accelerator) -> Result<Turn> {
        let job = self.job;
        let log = job
            .result
            .with_file_name(format!("rank-{}.jsonl", accelerator.rank()));
        let mut log = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(log)
            .expect("a writable folder");
        let mut is_begun = false;
        if self.history.len() < self.position.epoch() as usize {
            // A rank was lost after the last step of the epoch.
            self.evaluate(accelerator, self.position.epoch() - 1)?;
        }
        for epoch in self.position.epoch()..job.epochs {
            for batch in self.train.epoch(epoch) {
                let batch = batch?;
                std::thread::sleep(Duration::from_millis(job.pause_ms));
                if !is_begun {
                    let step = self.optimizer.steps() - self.position.step();
                    self.notifier.reach(Place::Step(step));
                }
                is_begun = true;
                // Recorded before `backward`, after which the other ranks can finish the step without this one.
                let step = StepRecord {
                    restart: accelerator.restarts(),
                    group: self.group,
                    epoch,
                    step: self.optimizer.steps() + 1,
                    rank: accelerator.rank(),
                    world_size: accelerator.world_size(),
                    samples: batch.real_indices().to_vec(),
                };
                let mut line = serde_json::to_string(&step).expect("plain data");
                // In one write: another rank may continue the file of one that is killed, and `writeln!` writes the end of
                // a line apart.
                line.push('\n');
                log.write_all(line.as_bytes()).expect("a writable folder");
                let loss = loss(&self.model, &batch);
                let gradients = accelerator
                    .backward(loss, &self.model, &batch)?
                    .clip_norm(1.0);
                if gradients.is_accumulating() {
                    continue;
                }
                is_begun = false;
                let trained = gradients.loss();
                self.model = self.optimizer.step(self.model.clone(), gradients);
                if let Some(loss) = trained {
                    accelerator.log("train", [("loss", loss)], step.step, epoch as f64);
                }
                if job.live && accelerator.regroup_pending()? {
                    return Ok(Turn::Regroups);
                }
                let preempted = accelerator.preempted()?;
                if preempted || self.optimizer.steps().is_multiple_of(job.save_every) {
                    accelerator.save_state(&self.checkpoints, self.parts())?;
                }
                if preempted {
                    return accelerator.finish_preempted().map(Turn::Ended);
                }
            }
            self.evaluate(accelerator, epoch)?;
            if accelerator.preempted()? {
                accelerator.save_state(&self.checkpoints, self.parts())?;
                return accelerator.finish_preempted().map(Turn::Ended);
            }
        }
        self.write(accelerator)?;
        self.notifier.reach(Place::End);
        accelerator.finish()?;
        Ok(Turn::Ended(ExitCode::SUCCESS))
    }

    /// Reads the second loader between epochs of the first.
    fn evaluate(&mut self, accelerator: &Accelerator, epoch: u64) -> Result<()> {
        let mut seen = Mean::new();
        for batch in self.valid.epoch(epoch) {
            let batch = batch?;
            self.notifier.reach(Place::Evaluation(
                epoch.saturating_sub(self.position.epoch()),
            ));
            let loss = loss(&self.model, &batch);
            seen.update(loss.into_scalar::<f64>(), batch.real());
        }
        let seen = accelerator.reduce_metric(seen)?;
        let samples = seen.samples() as u64;
        let means = [("loss", seen.value(), samples)];
        let steps = self.optimizer.steps();
        accelerator.log_means("valid", means, steps, (epoch + 1) as f64);
        self.history.push(samples);
        Ok(())
    }

    /// Writes the result.
    fn write(&self, accelerator: &Accelerator) -> Result<()> {
        let job = self.job;
        let held = self.model.num_params();
        // Units may be sharded, and a file has whole parameters.
        let file = job.result.with_file_name("result.safetensors");
        accelerator.save_model(&self.model, &file)?;
        let device = accelerator.device();
        let model = accelerator.load_model(Net::new(&device, job.dropout), &file)?;
        if !accelerator.is_main_process() {
            return Ok(());
        }
        let bits = |values: Vec<f64>| values.into_iter().map(f64::to_bits).collect();
        let (mut parameters, mut weights) = (Vec::new(), Vec::new());
        let model = model.valid();
        flat(&model, &mut parameters);
        flat(&model.hidden, &mut weights);
        flat(&model.norm.gamma, &mut weights);
        flat(&model.norm.beta, &mut weights);
        flat(&model.output, &mut weights);
        let result = TrainingResult {
            parameters: bits(parameters),
            weights: bits(weights),
            steps: self.optimizer.steps(),
            history: self.history.clone(),
            restarts: accelerator.restarts(),
            world_size: accelerator.world_size(),
            held,
        };
        let text = serde_json::to_string(&result).expect("plain data");
        std::fs::write(&job.result, text).expect("a writable folder");
        Ok(())
    }
}

/// Sends the notices of a job, on rank 0 and before any restart.
struct Notifier {
    due: Vec<Notice>,
    /// The process ids of all ranks.
    pids: Vec<u32>,
    second_kill: Option<(usize, u64)>,
}

impl Notifier {
    fn new(accelerator: &Accelerator, job: &TrainingJob, notifies: bool) -> Result<Self> {
        let pids = accelerator.gather_object(&std::process::id())?;
        let sends = accelerator.is_main_process() && notifies;
        let due = job.notices.iter().filter(|_| sends).cloned().collect();
        let second_kill = job.second_kill;
        Ok(Self {
            due,
            pids,
            second_kill,
        })
    }

    fn reach(&self, place: Place) {
        for notice in self.due.iter().filter(|notice| notice.place == place) {
            let mut kill = Command::new("kill");
            kill.arg(format!("-{}", notice.signal));
            kill.arg(self.pids[notice.rank].to_string());
            let status = kill.status().expect("the program `kill`");
            assert!(status.success(), "{kill:?}");
            if let Some((rank, after)) = self.second_kill {
                let pid = self.pids[rank].to_string();
                std::thread::spawn(move || {
                    std::thread::sleep(Duration::from_millis(after));
                    // It may have ended.
                    let _ = Command::new("kill").args(["-KILL", &pid]).status();
                });
            }
        }
    }
}

fn loss(model: &Net, batch: &RowBatch) -> Tensor<1> {
    CrossEntropyLossConfig::new()
        .init(&batch.rows.device())
        .forward(model.forward(batch.rows.clone()), batch.targets.clone())
}

#[derive(Debug, Module)]
pub(crate) struct Net {
    hidden: Unit<Linear>,
    norm: BatchNorm,
    dropout: Dropout,
    output: Unit<Linear>,
}

/// The number of hidden units, with which two ranks that shard the model cut the weights of the hidden layer.
const HIDDEN: usize = 1024;

impl Net {
    pub(crate) fn new(device: &Device, dropout: f64) -> Self {
        Self {
            hidden: Unit::new(LinearConfig::new(8, HIDDEN).init(device)),
            norm: BatchNormConfig::new(HIDDEN).init(device),
            dropout: DropoutConfig::new(dropout).init(),
            output: Unit::new(LinearConfig::new(HIDDEN, 3).init(device)),
        }
    }

    pub(crate) fn forward(&self, rows: Tensor<2>) -> Tensor<2> {
        let hidden = self.hidden.run(rows, |layer, rows| layer.forward(rows));
        // The statistics of a rank's own batch depend on the world size, so only jobs with dropout normalise.
        let hidden = match self.dropout.prob > 0.0 {
            true => self
                .norm
                .forward(hidden.unsqueeze_dim::<3>(2))
                .squeeze_dim::<2>(2),
            false => hidden,
        };
        let hidden = self.dropout.forward(relu(hidden));
        self.output.run(hidden, |layer, x| layer.forward(x))
    }
}

/// Rows made from their number, and changed a little by the generator of their sample.
pub(crate) struct Rows {
    pub(crate) count: usize,
}

impl Dataset<[f64; 9]> for Rows {
    fn get(&self, index: usize) -> std::result::Result<[f64; 9], DatasetError> {
        let augmented = (sample_rng_seed(5, 0, index as u64) >> 40) as f64 / 1e9;
        let mut row = [0.0; 9];
        for (at, value) in row.iter_mut().enumerate() {
            *value = noise(index * 9 + at) + (index % 3) as f64 * 0.3 + augmented;
        }
        row[8] = (index % 3) as f64;
        Ok(row)
    }

    fn len(&self) -> usize {
        self.count
    }
}

#[derive(Clone, Debug)]
pub(crate) struct RowBatch {
    pub(crate) rows: Tensor<2>,
    pub(crate) targets: Tensor<1, Int>,
}

pub(crate) struct RowBatcher;

impl Batcher<[f64; 9], RowBatch> for RowBatcher {
    fn batch(&self, items: Vec<[f64; 9]>, device: &Device) -> RowBatch {
        let values: Vec<f64> = items.iter().flat_map(|row| row[..8].to_vec()).collect();
        let targets: Vec<i64> = items.iter().map(|row| row[8] as i64).collect();
        RowBatch {
            rows: Tensor::from_data(TensorData::new(values, [items.len(), 8]), device),
            targets: Tensor::from_data(TensorData::new(targets, [items.len()]), device),
        }
    }
}
