use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use accelerator_host::sync::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::optuna_space::OptunaSpace;
use super::{Searcher, Suggestion, TrialEnd};
use crate::error::{Error, Kind, Result};
use crate::objective::{Mode, Objective};
use crate::space::Space;
use crate::trial_id::TrialId;
use crate::value::json_number;

/// Optuna 5 suggests configurations, in a Python process that the search starts; install it by
/// `pip install 'optuna>=5,<6'`, and `cmaes` for `CmaEsSampler`.
///
/// Its sampler is seeded with the search's seed. It learns what trials report, which of them a scheduler stopped, and which
/// failed. Parameters that it cannot draw are refused: grids, normal distributions, `sample_from`, and steps on a
/// logarithmic scale.
///
/// ```
/// use accelerator_tune::{Mode, Objective, Optuna, Search, SearchSpec, Space, loguniform};
///
/// let search = Search::new("line", Objective::new("loss", Mode::Min))
///     .space(Space::new([("lr", loguniform(1e-4, 1e-1))]))
///     .num_samples(50)
///     .search_alg(Optuna::new("TPESampler").sampler_arg("n_startup_trials", 5));
/// // In a file:
/// let spec: SearchSpec = serde_json::from_str(r#"{
///     "name": "line",
///     "metric": "loss",
///     "mode": "min",
///     "space": {"lr": {"loguniform": [1e-4, 1e-1]}},
///     "num_samples": 50,
///     "search_alg": {"type": "optuna", "sampler": "TPESampler", "sampler_args": {"n_startup_trials": 5}}
/// }"#)?;
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Optuna {
    sampler: String,
    sampler_args: Map<String, Value>,
    python: PathBuf,
}

impl Optuna {
    /// Uses the class of that name in `optuna.samplers`.
    #[must_use]
    pub fn new(sampler: impl Into<String>) -> Self {
        Self {
            sampler: sampler.into(),
            ..Self::default()
        }
    }

    /// A keyword argument of the sampler, such as `n_startup_trials`.
    #[must_use]
    pub fn sampler_arg(mut self, name: impl Into<String>, value: impl Into<Value>) -> Self {
        self.sampler_args.insert(name.into(), value.into());
        self
    }

    /// The interpreter that has Optuna, such as a virtual environment's `bin/python`; `python3` otherwise.
    #[must_use]
    pub fn python(mut self, interpreter: impl Into<PathBuf>) -> Self {
        self.python = interpreter.into();
        self
    }

    /// Starts it for a search.
    pub(crate) fn start(
        &self,
        space: &Space,
        objective: &Objective,
        seed: u64,
    ) -> Result<OptunaSearcher> {
        let space = OptunaSpace::new(space)?;
        let open = json!({
            "op": "open",
            "v": 1,
            "sampler": self.sampler,
            "args": self.sampler_args,
            // What NumPy takes.
            "seed": seed & 0xffff_ffff,
            "directions": [match objective.mode {
                Mode::Min => "minimize",
                Mode::Max => "maximize",
            }],
            "space": space.distributions()?,
        });
        let mut process = OptunaProcess::start(&self.python)?;
        let reply = process.call(&open)?;
        let python = self.python.display();
        let message = reply["message"].as_str().unwrap_or_default();
        let error = match reply["error"].as_str() {
            None => {
                let version = reply["optuna"].as_str().unwrap_or("of unknown version");
                return Ok(OptunaSearcher {
                    version: format!("Optuna {version}"),
                    process,
                    space,
                });
            }
            Some("import") => format!(
                "{python} has no Optuna ({message}); install it there by `{INSTALL}`, or name the interpreter that has it as \
                 `python`"
            ),
            Some("version") => {
                format!(
                    "{python} has Optuna {message}, and 5 is expected; install it there by `{INSTALL}`"
                )
            }
            Some("sampler") => {
                let sampler = &self.sampler;
                return Err(Error::misuse(format!(
                    "Optuna has no sampler `{sampler}`; it has {message}"
                )));
            }
            Some(_) => format!(
                "Optuna cannot make the sampler `{}` with {}: {message}{}",
                self.sampler,
                Value::Object(self.sampler_args.clone()),
                process.last_lines()
            ),
        };
        Err(Error::new(Kind::Searcher, error))
    }
}

/// The sampler that Optuna itself takes by default, by `python3`.
impl Default for Optuna {
    fn default() -> Self {
        Self {
            sampler: "TPESampler".to_owned(),
            sampler_args: Map::new(),
            python: "python3".into(),
        }
    }
}

/// Optuna, as it runs.
#[derive(Debug)]
pub(crate) struct OptunaSearcher {
    version: String,
    process: OptunaProcess,
    space: OptunaSpace,
}

impl OptunaSearcher {
    /// A reply that is no error.
    fn call(&mut self, call: &Value) -> Result<Value> {
        let reply = self.process.call(call)?;
        match reply.get("error") {
            None => Ok(reply),
            Some(_) => Err(Error::new(
                Kind::Searcher,
                format!(
                    "{} failed at {call}: {}{}",
                    self.version,
                    reply["message"].as_str().unwrap_or_default(),
                    self.process.last_lines()
                ),
            )),
        }
    }
}

impl Searcher for OptunaSearcher {
    fn ask(&mut self, trial: TrialId) -> Result<Suggestion> {
        let reply = self.call(&json!({"op": "ask", "id": trial.to_string()}))?;
        Ok(Suggestion::Config(self.space.config(&reply["params"])?))
    }

    fn report(&mut self, trial: TrialId, iteration: u64, value: f64) -> Result<()> {
        let (id, value) = (trial.to_string(), json_number(value));
        self.call(&json!({"op": "report", "id": id, "step": iteration, "value": value}))?;
        Ok(())
    }

    fn tell(&mut self, trial: TrialId, end: TrialEnd) -> Result<()> {
        let (state, value) = match end {
            TrialEnd::Completed(value) => ("COMPLETE", Some(json_number(value))),
            // Its value is the last that was reported. TPE ranks such trials behind complete ones, by how far they came and then
            // by value; told as complete, a value of an early iteration would be compared with final ones.
            TrialEnd::Stopped(_) => ("PRUNED", None),
            TrialEnd::Failed => ("FAIL", None),
        };
        let id = trial.to_string();
        self.call(&json!({"op": "tell", "id": id, "state": state, "value": value}))?;
        Ok(())
    }

    fn version(&self) -> Option<String> {
        Some(self.version.clone())
    }
}

/// Python, with the script.
#[derive(Debug)]
struct OptunaProcess {
    child: Child,
    calls: ChildStdin,
    replies: Receiver<io::Result<String>>,
    errors: Arc<Mutex<VecDeque<String>>>,
    /// Ends when the process has closed its standard error.
    error_reader: JoinHandle<()>,
}

impl OptunaProcess {
    fn start(python: &PathBuf) -> Result<Self> {
        let mut command = Command::new(python);
        command
            .args(["-u", "-c", include_str!("optuna.py")])
            // Suggestions may follow from the order of a set.
            .env("PYTHONHASHSEED", "0")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // A Ctrl-C is for the search, which tells what trials report while they save.
            .process_group(0);
        let mut child = accelerator_host::prepare_child(&mut command).spawn().map_err(|error| {
            let python = python.display();
            let message = format!(
                "cannot start {python}, which Optuna needs: {error}; install Python 3 and, by `{INSTALL}`, Optuna, or name the \
                 interpreter that has it as `python`"
            );
            Error::new(Kind::Searcher, message).with_source(error)
        })?;
        let (Some(calls), Some(stdout), Some(stderr)) =
            (child.stdin.take(), child.stdout.take(), child.stderr.take())
        else {
            return Err(Error::new(Kind::Io, "Python has no pipes"));
        };
        let (sender, replies) = mpsc::channel();
        thread::spawn(move || {
            for line in BufReader::new(stdout).lines() {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        let errors = Arc::new(Mutex::new(VecDeque::new()));
        let lines = errors.clone();
        let error_reader = thread::spawn(move || {
            for line in BufReader::new(stderr)
                .split(b'\n')
                .map_while(io::Result::ok)
            {
                let mut lines = lines.lock();
                if lines.len() == ERROR_LINES {
                    lines.pop_front();
                }
                lines.push_back(String::from_utf8_lossy(&line).into_owned());
            }
        });
        Ok(Self {
            child,
            calls,
            replies,
            errors,
            error_reader,
        })
    }

    /// Its reply, which may be an error.
    fn call(&mut self, call: &Value) -> Result<Value> {
        let line = format!("{call}\n");
        // Where it has ended there is no reply either.
        let _ = self.calls.write_all(line.as_bytes());
        match self.replies.recv_timeout(DEADLINE) {
            Ok(Ok(reply)) => serde_json::from_str(&reply).map_err(|error| {
                let message = format!("Optuna's reply to {call} is {reply:?}: {error}");
                Error::new(Kind::Searcher, message).with_source(error)
            }),
            Ok(Err(error)) => {
                let message = format!("Optuna's reply to {call} cannot be read: {error}");
                Err(Error::new(Kind::Searcher, message).with_source(error))
            }
            Err(RecvTimeoutError::Timeout) => Err(Error::new(
                Kind::Searcher,
                format!(
                    "Optuna did not reply to {call} within {DEADLINE:?}; run the search again to resume it{}",
                    self.last_lines()
                ),
            )),
            Err(RecvTimeoutError::Disconnected) => Err(self.ended(call)),
        }
    }

    fn ended(&mut self, call: &Value) -> Error {
        // It has closed its output, and so ends. What it says as it ends is read by then.
        let until = Instant::now() + ENDING;
        while Instant::now() < until
            && !(self.error_reader.is_finished() && matches!(self.child.try_wait(), Ok(Some(_))))
        {
            thread::sleep(Duration::from_millis(10));
        }
        let _ = self.child.kill();
        let how = match self.child.wait() {
            Ok(status) => format!(" ({status})"),
            Err(_) => String::new(),
        };
        let operation = call["op"].as_str().unwrap_or_default();
        Error::new(
            Kind::Searcher,
            format!(
                "Optuna's Python process ended{how} instead of replying to `{operation}`; run the search again to resume it{}",
                self.last_lines()
            ),
        )
    }

    /// Returns its last lines of standard error, for the end of a message.
    fn last_lines(&self) -> String {
        let lines = self.errors.lock();
        match lines.is_empty() {
            true => String::new(),
            false => {
                let lines: Vec<_> = lines.iter().map(String::as_str).collect();
                format!("; its last lines:\n{}", lines.join("\n"))
            }
        }
    }
}

impl Drop for OptunaProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const INSTALL: &str = "pip install 'optuna>=5,<6'";
/// The time that Optuna may take for one reply. Samplers that fit a model to thousands of trials take seconds.
const DEADLINE: Duration = Duration::from_secs(300);
/// The time that it may take to end.
const ENDING: Duration = Duration::from_secs(5);
/// The number of lines to keep of what Python writes to its standard error.
const ERROR_LINES: usize = 20;
