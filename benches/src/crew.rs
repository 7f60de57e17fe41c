use std::io::{self, BufRead, BufReader, Write};
use std::net::TcpListener;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use clap::ValueEnum;

use crate::model::Model;
use crate::worker::{Loop, Round};

/// The settings of glibc's allocator that `accel-launch` gives to every process.
pub const ALLOCATOR: [(&str, &str); 4] = [
    ("MALLOC_MMAP_THRESHOLD_", "4294967296"),
    ("MALLOC_TOP_PAD_", "67108864"),
    ("MALLOC_TRIM_THRESHOLD_", "4294967296"),
    ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"),
];

/// Workers that run at the same time.
#[derive(Clone, Debug)]
pub struct Plan {
    /// What they train.
    pub model: Model,
    /// How.
    pub kind: Loop,
    /// Samples in a batch of each.
    pub batch_size: usize,
    /// How many there are.
    pub processes: usize,
    /// Whether they are ranks of one job, or know nothing of each other.
    pub link: CrewLink,
    /// Threads of each.
    pub threads: usize,
    /// Where they may run.
    pub cores: Cores,
    /// Further variables of their environment.
    pub variables: Vec<(String, String)>,
}

/// What joins the workers of a crew.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum CrewLink {
    /// They are ranks of one job.
    Job,
    /// Nothing.
    None,
}

/// Where workers may run.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Cores {
    /// The n-th on the n-th core.
    Pinned,
    /// Anywhere.
    Any,
}

/// Workers that have been started. They end when it is dropped.
#[derive(Debug)]
pub struct Crew {
    workers: Vec<Worker>,
    threads: usize,
}

#[derive(Debug)]
struct Worker {
    child: Child,
    commands: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Crew {
    /// Starts the workers: this program with the argument `worker`, which is to call
    /// [`work`](crate::worker::work).
    ///
    /// # Errors
    ///
    /// When a process cannot be started. Pinning takes the program `taskset`.
    pub fn start(plan: &Plan) -> io::Result<Self> {
        let port = TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port();
        let workers = (0..plan.processes)
            .map(|index| {
                let mut command = command(plan, index)?;
                if plan.link == CrewLink::Job {
                    command
                        .env("RANK", index.to_string())
                        .env("WORLD_SIZE", plan.processes.to_string())
                        .env("LOCAL_RANK", index.to_string())
                        .env("LOCAL_WORLD_SIZE", plan.processes.to_string())
                        .env("MASTER_ADDR", "127.0.0.1")
                        .env("MASTER_PORT", port.to_string());
                }
                Worker::start(&mut command)
            })
            .collect::<io::Result<_>>()?;
        Ok(Self {
            workers,
            threads: plan.processes * plan.threads,
        })
    }

    /// Threads that compute, over all workers.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Lets every worker do so many steps, all at once, and waits for their reports.
    ///
    /// # Errors
    ///
    /// When a worker has ended; its own message is on standard error.
    pub fn round(&mut self, steps: usize) -> io::Result<Vec<Round>> {
        for worker in &mut self.workers {
            worker.tell(steps)?;
        }
        self.workers.iter_mut().map(Worker::report).collect()
    }
}

fn command(plan: &Plan, index: usize) -> io::Result<Command> {
    let program = std::env::current_exe()?;
    let mut command = match plan.cores {
        Cores::Any => Command::new(program),
        Cores::Pinned => {
            let mut taskset = Command::new("taskset");
            taskset.arg("-c").arg(index.to_string()).arg(program);
            taskset
        }
    };
    let kind = plan.kind.to_possible_value();
    command
        .arg("worker")
        .args(["--model", plan.model.name()])
        .args(["--batch-size", &plan.batch_size.to_string()])
        .args(["--loop", kind.as_ref().map_or("", |kind| kind.get_name())])
        .env("RAYON_NUM_THREADS", plan.threads.to_string())
        .envs(plan.variables.iter().cloned());
    Ok(command)
}

impl Worker {
    fn start(command: &mut Command) -> io::Result<Self> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let pipes = child.stdin.take().zip(child.stdout.take());
        let (commands, answers) = pipes.ok_or_else(|| io::Error::other("a worker has no pipes"))?;
        Ok(Self {
            child,
            commands: Some(commands),
            answers: BufReader::new(answers),
        })
    }

    fn tell(&mut self, steps: usize) -> io::Result<()> {
        match &mut self.commands {
            Some(commands) => writeln!(commands, "steps {steps}"),
            None => Err(io::Error::other("a worker was told to end")),
        }
    }

    fn report(&mut self) -> io::Result<Round> {
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        serde_json::from_str(&line).map_err(|error| {
            io::Error::other(format!(
                "expected a worker's report, found {line:?}: {error}"
            ))
        })
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        for worker in &mut self.workers {
            worker.commands = None;
        }
        for worker in &mut self.workers {
            // Nothing is left to be done for a process that cannot be waited for.
            let _ = worker.child.wait();
        }
    }
}
