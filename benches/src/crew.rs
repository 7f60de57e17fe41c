use std::io::{self, BufRead, BufReader, Write};
use std::net::TcpListener;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use accelerator_host::allocator::ALLOCATOR_VARIABLES;
use clap::ValueEnum;

use crate::model::Model;
use crate::worker::{Loop, Round};

/// The plan for workers that run at the same time.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The model to train.
    pub model: Model,
    /// The training loop.
    pub kind: Loop,
    /// The samples in a batch of each worker.
    pub batch_size: usize,
    /// The number of workers.
    pub processes: usize,
    /// The link between the workers.
    pub link: CrewLink,
    /// The threads of each worker.
    pub threads: usize,
}

/// The link between the workers of a crew.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum CrewLink {
    /// The workers are ranks of one job.
    Job,
    /// The workers do not communicate.
    None,
}

/// Workers that are running. They end on drop.
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
    /// Starts the workers: this program with the argument `worker`, for which it must call
    /// [`work`](crate::worker::work).
    ///
    /// # Errors
    ///
    /// If a process cannot be started.
    pub fn start(plan: &Plan) -> io::Result<Self> {
        let port = TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port();
        let workers = (0..plan.processes)
            .map(|index| {
                let mut command = command(plan)?;
                if plan.link == CrewLink::Job {
                    command.envs(rank_variables(index, plan.processes, port));
                }
                Worker::start(&mut command)
            })
            .collect::<io::Result<_>>()?;
        Ok(Self {
            workers,
            threads: plan.processes * plan.threads,
        })
    }

    /// Returns the number of computing threads, over all workers.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Lets all workers take `steps` steps at the same time, and waits for their reports.
    ///
    /// # Errors
    ///
    /// If a worker has ended; its own message is on standard error.
    pub fn round(&mut self, steps: usize) -> io::Result<Vec<Round>> {
        for worker in &mut self.workers {
            worker.tell(steps)?;
        }
        self.workers.iter_mut().map(Worker::report).collect()
    }
}

/// Returns the variables by which a process is one of so many ranks on this machine.
pub fn rank_variables(rank: usize, ranks: usize, port: u16) -> [(&'static str, String); 6] {
    [
        ("RANK", rank.to_string()),
        ("WORLD_SIZE", ranks.to_string()),
        ("LOCAL_RANK", rank.to_string()),
        ("LOCAL_WORLD_SIZE", ranks.to_string()),
        ("MASTER_ADDR", "127.0.0.1".to_owned()),
        ("MASTER_PORT", port.to_string()),
    ]
}

fn command(plan: &Plan) -> io::Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    let kind = plan.kind.to_possible_value();
    command
        .arg("worker")
        .args(["--model", plan.model.name()])
        .args(["--batch-size", &plan.batch_size.to_string()])
        .args(["--loop", kind.as_ref().map_or("", |kind| kind.get_name())])
        .env("RAYON_NUM_THREADS", plan.threads.to_string())
        .envs(ALLOCATOR_VARIABLES);
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
            // If waiting fails, nothing is left to do about the process.
            let _ = worker.child.wait();
        }
    }
}
