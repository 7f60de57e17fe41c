//! Processes of trials on this host.

use std::env;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::process::CommandExt;
use std::path::{self, Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::thread;

use accelerator_collective::internal::Token;
use accelerator_host::process::find_installed;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Kind, Result};
use crate::trial::protocol::WorkerPlace;

pub(super) trait Process: std::fmt::Debug + Send {
    /// Its number to the system.
    fn id(&self) -> u32;

    /// Sends a signal to it, and to what it has started.
    fn signal(&self, signal: Signal);

    /// Takes its end, once it was told. What it has started ends, too.
    fn reap(&mut self) -> Option<ExitStatus>;
}

pub(crate) type Output = Box<dyn Read + Send>;

#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct ProcessSpec {
    pub(crate) program: ProcessProgram,
    /// The number of ranks; `accel-launch` starts more than one.
    pub(crate) ranks: usize,
    /// The number of threads that may compute at a time, in all ranks.
    pub(crate) threads: usize,
    /// The cores to which it is bound; if there are none, the system chooses.
    pub(crate) cores: Vec<usize>,
    pub(crate) gpus: Vec<String>,
    /// The file for its standard error, and for a worker's standard output.
    pub(crate) log: PathBuf,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) enum ProcessProgram {
    /// This program, as a worker.
    Worker(WorkerPlace),
    /// Any program. Its standard output is read.
    Command(Vec<String>),
}

/// A process, with those that it starts: a group.
#[derive(Debug)]
pub(super) struct LocalProcess {
    child: Child,
    /// Leads the group, and ends it when this process has ended. A worker knows by itself, and leads its own.
    guard: Option<Child>,
    is_reaped: bool,
}

impl LocalProcess {
    /// Starts a process; `token` is the search's, which a worker has to know.
    pub(super) fn spawn(spec: &ProcessSpec, token: &Token) -> Result<Self> {
        let output = OpenOptions::new().create(true).append(true).open(&spec.log);
        let output = output.map_err(|error| Error::io("write", &spec.log, error))?;
        let (mut command, stdout, inherited, guard) = match &spec.program {
            ProcessProgram::Worker(place) => (
                worker(spec.ranks)?,
                output.try_clone()?.into(),
                Some(place.to_inherit(token)?),
                None,
            ),
            ProcessProgram::Command(words) => {
                let mut command = of_ranks(Path::new(&words[0]), spec.ranks)?;
                command.args(&words[1..]);
                (command, Stdio::piped(), None, guard())
            }
        };
        command
            .env("CUDA_VISIBLE_DEVICES", spec.gpus.join(","))
            .stdin(Stdio::null())
            .stdout(stdout)
            .stderr(output)
            .process_group(guard.as_ref().map_or(0, |guard| guard.id().cast_signed()));
        if let Some(folder) = spec
            .log
            .parent()
            .and_then(|folder| path::absolute(folder).ok())
        {
            command.env(accelerator_host::TRIAL_FOLDER.name, folder);
        }
        let threads = (spec.threads / spec.ranks).max(1).to_string();
        let defaults = [
            ("RAYON_NUM_THREADS", &*threads),
            ("OMP_NUM_THREADS", &*threads),
            accelerator_host::PYTHON_UNBUFFERED,
        ];
        for (name, value) in defaults {
            if env::var_os(name).is_none() {
                command.env(name, value);
            }
        }
        let program = Path::new(command.get_program()).to_owned();
        accelerator_host::prepare_child(&mut command);
        let child = bound_to(&spec.cores, || match inherited {
            Some(content) => {
                let variable = accelerator_host::TUNE_WORKER.name;
                accelerator_collective::internal::spawn_with_inherited(command, variable, &content)
            }
            None => command.spawn(),
        });
        let child = child.map_err(|error| not_started(&program, error))?;
        Ok(Self {
            child,
            guard,
            is_reaped: false,
        })
    }

    /// The standard output of a [command](ProcessProgram::Command).
    pub(super) fn take_output(&mut self) -> Option<ChildStdout> {
        self.child.stdout.take()
    }

    /// Tells when it has ended. It is left unreaped, so that its id stays its own.
    pub(super) fn watch(&self, exited: impl FnOnce() + Send + 'static) -> Result<()> {
        let pid = pid_of(&self.child);
        thread::Builder::new()
            .name("watch".to_owned())
            .spawn(move || {
                let Some(pid) = pid else { return };
                let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
                while let Err(rustix::io::Errno::INTR) =
                    rustix::process::waitid(WaitId::Pid(pid), options)
                {}
                exited();
            })?;
        Ok(())
    }
}

impl Process for LocalProcess {
    fn id(&self) -> u32 {
        self.child.id()
    }

    fn signal(&self, signal: Signal) {
        let leader = self.guard.as_ref().unwrap_or(&self.child);
        if !self.is_reaped
            && let Some(group) = pid_of(leader)
        {
            // That nothing is left to receive it is no error.
            let _ = rustix::process::kill_process_group(group, signal);
        }
    }

    fn reap(&mut self) -> Option<ExitStatus> {
        self.signal(Signal::KILL);
        let status = self.child.wait().ok();
        // It was of the group.
        let _ = self.guard.take().map(|mut guard| guard.wait());
        self.is_reaped = true;
        status
    }
}

fn pid_of(child: &Child) -> Option<Pid> {
    Pid::from_raw(child.id().cast_signed())
}

/// The leader of a new group, which kills the group when its standard input is closed: the kernel does that when this process
/// ends, however it ends. `None` where there is no shell: what this process has started outlives its SIGKILL.
fn guard() -> Option<Child> {
    let mut shell = Command::new("/bin/sh");
    shell
        .args(["-c", "trap '' HUP INT TERM; read -r _; kill -KILL 0"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0);
    accelerator_host::prepare_child(&mut shell).spawn().ok()
}

fn not_started(program: &Path, error: io::Error) -> Error {
    let is_name = program.components().count() == 1;
    match error.kind() {
        io::ErrorKind::NotFound if is_name => {
            let name = program.display();
            let text = format!(
                "cannot start {name}: no program of this name is on the PATH; a search builds none, so build it first, and \
                 give its path, such as target/release/{name}"
            );
            Error::new(Kind::NotFound, text).with_source(error)
        }
        _ => Error::io("start", program, error),
    }
}

/// The file that a process writes to, from which its last lines are read.
#[derive(Debug)]
pub(super) struct ProcessLog {
    path: PathBuf,
    /// The position at which the output of the present trial begins.
    from: u64,
}

impl ProcessLog {
    pub(super) fn new(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            from: 0,
        }
    }

    /// Marks the end: what is written from here on is the next trial's.
    pub(super) fn mark(&mut self) {
        self.from = self.path.metadata().map_or(0, |log| log.len());
    }

    /// The end of what was written since then.
    pub(super) fn last_lines(&self) -> String {
        let read = || -> std::io::Result<String> {
            let mut log = File::open(&self.path)?;
            let from = self
                .from
                .max(log.metadata()?.len().saturating_sub(TAIL_BYTES));
            log.seek(SeekFrom::Start(from))?;
            let mut bytes = Vec::new();
            log.read_to_end(&mut bytes)?;
            Ok(String::from_utf8_lossy(&bytes).into_owned())
        };
        let text = read().unwrap_or_default();
        let lines: Vec<_> = text.lines().collect();
        lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n")
    }
}

const TAIL_BYTES: u64 = 8 << 10;
const TAIL_LINES: usize = 10;

/// Starts a process whose threads run on these cores, or on any if there are none: it inherits the affinity of the
/// thread that starts it.
#[cfg(target_os = "linux")]
fn bound_to<T>(cores: &[usize], start: impl FnOnce() -> T) -> T {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
    let mut set = CpuSet::new();
    cores.iter().for_each(|core| set.set(*core));
    let before = match cores.is_empty() {
        true => None,
        false => sched_getaffinity(None).ok(),
    };
    if before.is_some()
        && let Err(error) = sched_setaffinity(None, &set)
    {
        tracing::warn!("the trial cannot be bound to the cores {cores:?}: {error}");
    }
    let started = start();
    // This thread may use these cores, since it has had them before.
    let _ = before.map(|before| sched_setaffinity(None, &before));
    started
}

#[cfg(not(target_os = "linux"))]
fn bound_to<T>(_cores: &[usize], start: impl FnOnce() -> T) -> T {
    start()
}

/// Returns a command that starts this program again, as a worker that inherits its place. The program may have been
/// rebuilt meanwhile: trials run the version of the search.
fn worker(ranks: usize) -> Result<Command> {
    let program = env::current_exe()?;
    let running = format!("/proc/{}/exe", std::process::id());
    let mut command = match ranks {
        // The child resolves this link itself, while it still runs this process's program.
        1 if cfg!(target_os = "linux") => of_ranks(Path::new("/proc/self/exe"), 1)?,
        _ if cfg!(target_os = "linux") && !program.exists() => {
            of_ranks(Path::new(&running), ranks)?
        }
        _ => of_ranks(&program, ranks)?,
    };
    if ranks == 1 {
        command.arg0(program);
    }
    command.args(env::args_os().skip(1));
    Ok(command)
}

/// A program as one process, or as the ranks of a group.
fn of_ranks(program: &Path, ranks: usize) -> Result<Command> {
    if ranks > 1 {
        let mut command = Command::new(launcher()?);
        command.arg("--num-processes").arg(ranks.to_string());
        command.arg(program);
        return Ok(command);
    }
    let mut command = Command::new(program);
    // It is no rank of the job that the search is one of.
    for name in accelerator_collective::internal::place_variables() {
        command.env_remove(name);
    }
    // With these and no place it would be taken for a task that srun should have started.
    for name in ["SLURM_NTASKS", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"] {
        command.env_remove(name);
    }
    Ok(command)
}

fn launcher() -> Result<PathBuf> {
    find_installed("accel-launch").ok_or_else(|| {
        Error::new(
            Kind::NotFound,
            "trials of several processes are started by `accel-launch`, which is neither beside this program nor on the PATH; \
             install it: cargo install accel-launch",
        )
    })
}
