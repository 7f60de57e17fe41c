//! Searches for the rate at which gradient descent on a parabola ends lowest. Tests use it, too.
//!
//! ```text
//! cargo run --release -p burn-accelerate-tune --example quadratic -- --num-samples 16 --slots 2
//! ```

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use accelerator_tune::{
    Asha, AshaPromotion, BoxError, CheckpointSettings, Config, Display, MaxFailures, Metrics, Mode,
    Objective, Optuna, Pbt, Reset, Resources, Search, SearchEnd, SearchOrder, Space, Stop,
    Trainable, TrialContext, WorkerReuse, grid_search, loguniform, uniform,
};

/// The command line: pairs of a flag and its value.
struct Args(Vec<String>);

impl Args {
    fn value(&self, flag: &str) -> Option<&str> {
        let at = self.0.iter().position(|arg| arg == flag)?;
        self.0.get(at + 1).map(String::as_str)
    }

    fn parse<T: std::str::FromStr>(&self, flag: &str, default: T) -> Result<T, BoxError>
    where
        T::Err: std::error::Error + Send + Sync + 'static,
    {
        Ok(self
            .value(flag)
            .map(str::parse)
            .transpose()?
            .unwrap_or(default))
    }

    fn has(&self, flag: &str) -> bool {
        self.0.iter().any(|arg| arg == flag)
    }
}

fn main() -> Result<ExitCode, BoxError> {
    let args = Args(std::env::args().skip(1).collect());
    if args.value("--fault") == Some("no-connection")
        && std::env::var_os("ACCEL_TUNE_WORKER").is_some()
    {
        std::thread::sleep(Duration::from_secs(3600));
    }
    if args.value("--fault") == Some("late") && std::env::var_os("ACCEL_TUNE_WORKER").is_some() {
        let out: PathBuf = args.parse("--out", PathBuf::new())?;
        std::fs::write(out.join("late"), "")?;
        let until = Instant::now() + Duration::from_secs(120);
        while !out.join("go").exists() {
            if Instant::now() > until {
                return Err("nothing lets this worker continue".into());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    let max_t = args.parse("--max-iterations", 16)?;
    let space = match args.value("--space") {
        Some("schedules") => schedules(),
        _ => Space::new([
            ("lr", loguniform(1e-4, 1.0)),
            ("momentum", uniform(0.1, 0.9)),
        ]),
    };
    let mut search = Search::new("Quadratic", Objective::new("loss", Mode::Min))
        .space(space)
        .num_samples(args.parse("--num-samples", 8)?)
        .seed(args.parse("--seed", 0)?)
        .stop(Stop::new().iterations(u32::try_from(max_t)?))
        .folder(args.parse("--out", PathBuf::from("tune/quadratic"))?)
        .max_failures(MaxFailures::from(args.parse("--max-failures", 0)?))
        .resources_per_trial(Resources {
            gpus: args.parse("--gpus", 0.0)?,
            processes: args.parse("--processes", 1)?,
            ..Resources::default()
        });
    search = match args.value("--scheduler") {
        Some("asha") => search.scheduler(Asha {
            max_t,
            reduction_factor: 2,
            ..Asha::default()
        }),
        Some("asha-promotion") => search.scheduler(AshaPromotion {
            max_t,
            reduction_factor: 2,
            ..AshaPromotion::default()
        }),
        Some("pbt") => {
            let mutations = Space::new([("lr", loguniform(1e-4, 1.0))]);
            search.scheduler(Pbt::new(2.0, mutations))
        }
        _ => search,
    };
    if let Some(sampler) = args.value("--optuna") {
        let python = args.parse("--python", PathBuf::from("python3"))?;
        search = search.search_alg(Optuna::new(sampler).python(python));
    }
    if let Some(workers) = args.value("--ordered") {
        let workers = workers.parse()?;
        search = search.order(SearchOrder::Ordered { workers });
    }
    if let Some(slots) = args.value("--slots") {
        search = search.slots(slots.parse()?);
    }
    if let Some(every) = args.value("--checkpoint-every") {
        let frequency = Some(every.parse()?);
        search = search.checkpoints(CheckpointSettings {
            frequency,
            ..Default::default()
        });
    }
    if let Some(seconds) = args.value("--report-timeout") {
        search = search.report_timeout(Duration::from_secs_f64(seconds.parse()?));
    }
    if let Some(seconds) = args.value("--time-budget") {
        search = search.time_budget(Duration::from_secs_f64(seconds.parse()?));
    }
    if args.has("--warm") {
        search = search.reuse_workers(WorkerReuse::Warm);
    }
    if args.has("--stop-at-odd-trials") {
        let stop = Stop::new().iterations(u32::try_from(max_t)?);
        search = search.stop(
            stop.when(|trial, result| trial.number() % 2 == 1 && result.training_iteration == 2),
        );
    }
    if args.has("--share-prefixes") {
        search = search.share_prefixes();
    }
    if let Some(folder) = args.value("--tensorboard") {
        search = search.tensorboard(folder);
    }
    if args.has("--quiet") {
        search = search.display(Display::Quiet);
    }
    let results = match args.value("--fault") {
        None if args.has("--function") => search.run_fn(|trial, config| {
            let mut descent = Descent::setup(config, trial)?;
            if let Some(folder) = trial.checkpoint() {
                descent.load_checkpoint(folder)?;
            }
            loop {
                let metrics = descent.step()?;
                trial.report_with(metrics, |folder| descent.save_checkpoint(folder))?;
            }
        })?,
        None => search.run::<Descent>()?,
        Some(fault) => {
            let fault = fault.to_owned();
            search.run_fn(move |trial, config| {
                let lr: f64 = config.parse("lr")?;
                loop {
                    trial.report([("loss", lr)])?;
                    match fault.as_str() {
                        "error" => return Err("the data set is empty".into()),
                        "panic" => panic!("the loss is not a number"),
                        "exit" => {
                            eprintln!("out of luck");
                            std::process::exit(7);
                        }
                        "nested" if trial.iteration() == 1 => {
                            let mut nested = Command::new(std::env::current_exe()?);
                            nested.args(["--quiet", "--num-samples", "1", "--out", "nested"]);
                            if !nested.current_dir(trial.folder()).status()?.success() {
                                return Err("the search of its own has failed".into());
                            }
                        }
                        "end" if trial.iteration() == 3 => return Ok(()),
                        "hang" if trial.iteration() == 2 => loop {
                            std::hint::spin_loop();
                        },
                        "nan" => trial.report([("loss", f64::NAN)])?,
                        _ => {}
                    }
                }
            })?
        }
    };
    println!(
        "Best config is: {:?}",
        results
            .best_config("loss", Mode::Min)
            .map(|best| best.to_string())
    );
    Ok(match results.ending() {
        SearchEnd::Finished => ExitCode::SUCCESS,
        SearchEnd::Interrupted | SearchEnd::OutOfTime => ExitCode::from(3),
    })
}

/// Rates that are equal in the first iterations.
fn schedules() -> Space {
    let rate = |options: [f64; 3]| grid_search(options.map(Into::into));
    let schedule: Vec<(u64, _)> = vec![
        (0, 0.3.into()),
        (8, rate([0.2, 0.1, 0.05])),
        (12, rate([0.04, 0.02, 0.01])),
    ];
    let steps = schedule
        .into_iter()
        .map(|(start, rate)| Space::list([start.into(), rate]));
    let schedule = Space::new([("schedule", Space::list(steps))]);
    Space::new([("lr", schedule.into()), ("momentum", 0.5.into())])
}

/// Gradient descent with momentum on x².
struct Descent {
    x: f64,
    speed: f64,
    iteration: u64,
    config: Config,
    pause: Duration,
}

impl Descent {
    fn lr(&self) -> Result<f64, BoxError> {
        if self.config.value("lr/schedule").is_none() {
            return Ok(self.config.parse("lr")?);
        }
        let steps: Vec<(u64, f64)> = self.config.parse("lr/schedule")?;
        let now = steps
            .iter()
            .rev()
            .find(|(start, _)| *start <= self.iteration);
        Ok(now.map_or(0.0, |(_, rate)| *rate))
    }
}

impl Trainable for Descent {
    fn setup(config: &Config, _context: &TrialContext) -> Result<Self, BoxError> {
        let pause = std::env::var("QUADRATIC_PAUSE_MS").ok();
        let pause = pause.map(|pause| pause.parse()).transpose()?.unwrap_or(0);
        Ok(Self {
            x: 5.0,
            speed: 0.0,
            iteration: 0,
            config: config.clone(),
            pause: Duration::from_millis(pause),
        })
    }

    fn step(&mut self) -> Result<Metrics, BoxError> {
        std::thread::sleep(self.pause);
        let momentum: f64 = self.config.parse("momentum")?;
        self.speed = momentum * self.speed - self.lr()? * 2.0 * self.x;
        self.x += self.speed;
        self.iteration += 1;
        Ok(Metrics::from([
            ("loss", self.x * self.x),
            ("speed", self.speed),
        ]))
    }

    fn save_checkpoint(&mut self, folder: &Path) -> Result<(), BoxError> {
        let state = (self.x, self.speed, self.iteration);
        Ok(std::fs::write(
            folder.join("state.json"),
            serde_json::to_vec(&state)?,
        )?)
    }

    fn load_checkpoint(&mut self, folder: &Path) -> Result<(), BoxError> {
        let state = std::fs::read(folder.join("state.json"))?;
        (self.x, self.speed, self.iteration) = serde_json::from_slice(&state)?;
        Ok(())
    }

    fn reset_config(&mut self, config: &Config, context: &TrialContext) -> Result<Reset, BoxError> {
        *self = Self::setup(config, context)?;
        Ok(Reset::Done)
    }
}
