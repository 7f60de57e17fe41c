//! The hosts of a job: their number, the index of this one, and the address of host 0.
//!
//! Options say so, and where they do not, the variables of the engine that has started a launcher on every host.

use std::net::ToSocketAddrs;
use std::num::NonZeroUsize;
use std::time::Duration;

use accelerator_collective::Topology;
use accelerator_collective::internal::{AgentLaunch, AgentProcesses};

use super::hosts::Endpoint;
use super::options::{Options, PerHost, Processes};
use crate::error::{Error, Result, chain};
use crate::gpu::{self, GpuIds, VISIBLE, Visible};
use crate::settings;

/// The default time for which hosts wait for each other: a node that is being set up takes minutes.
pub(crate) const DEFAULT_JOIN_TIMEOUT: Duration = Duration::from_secs(600);

/// The place of this host among several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HostPlace {
    /// The largest number of hosts, at least two.
    pub(crate) hosts: usize,
    /// The fewest that the job runs on.
    pub(crate) least_hosts: usize,
    /// The index of this host.
    pub(crate) host: usize,
    /// The address on which host 0 listens.
    pub(crate) endpoint: Endpoint,
    /// The time to wait for other hosts.
    pub(crate) join_timeout: Duration,
}

/// Resolves the number of ranks on this host, and the place of this host if there are several. `lookup` finds the
/// variables of an engine.
///
/// # Errors
/// When options are missing or contradict each other, an engine's variables are malformed, or there is no GPU to
/// count.
pub(crate) fn resolve(
    options: &Options,
    lookup: impl Fn(&str) -> Option<String>,
) -> Result<(Options, Option<HostPlace>)> {
    let mut options = options.clone();
    let given = options.nnodes;
    complete(&mut options, lookup)?;
    let place = place(&options, given)?;
    if let Some(per_host) = options.nproc_per_node {
        options.num_processes = Some(Processes::exactly(per_host.count(&options)?));
    }
    if let Some(place) = &place {
        if options.rdzv_endpoint.is_none() {
            // They have named the endpoint.
            (options.master_addr, options.master_port) = (None, None);
            options.rdzv_endpoint = Some(place.endpoint.clone());
        }
    } else if let Some(host) = &options.master_addr {
        let is_known = (host.as_str(), 0).to_socket_addrs();
        if !is_known.is_ok_and(|mut addresses| addresses.next().is_some()) {
            return Err(Error::usage(format!(
                "--master-addr {host}: expected an address or a host name that can be resolved"
            )));
        }
    }
    Ok((options, place))
}

/// Fills options that are not given with the variables of an engine. A job is on this host alone if options say
/// `--num-processes` or `--nnodes 1`.
fn complete(options: &mut Options, lookup: impl Fn(&str) -> Option<String>) -> Result<()> {
    let is_here = options.num_processes.is_some()
        || options.nnodes == Some(Processes::exactly(NonZeroUsize::MIN));
    let has_endpoint = options.rdzv_endpoint.is_some() || options.master_addr.is_some();
    if is_here || (options.nnodes.is_some() && options.node_rank.is_some() && has_endpoint) {
        return Ok(());
    }
    let engine = AgentLaunch::from_vars(lookup).map_err(|error| {
        Error::usage(format!(
            "{}; for a job on this host alone, give --nnodes 1",
            chain(&error)
        ))
    })?;
    let Some(engine) = engine else {
        return Ok(());
    };
    if options.nnodes.is_none() {
        let Some(nodes) = engine.nodes else {
            return Ok(());
        };
        if nodes.most <= 1 {
            options.nnodes = Some(Processes::exactly(NonZeroUsize::MIN));
            return Ok(());
        }
        let [least, most] = [nodes.least, nodes.most].map(NonZeroUsize::new);
        options.nnodes = least
            .zip(most)
            .map(|(least, most)| Processes { least, most });
    }
    options.node_rank = options.node_rank.or(engine.node);
    if !has_endpoint {
        options.rdzv_endpoint = engine.head.map(|head| Endpoint {
            host: head.host,
            port: head.port.unwrap_or(Endpoint::DEFAULT_PORT),
        });
    }
    if options.nproc_per_node.is_none() {
        options.nproc_per_node = match engine.processes {
            Some(AgentProcesses::Number(count)) => NonZeroUsize::new(count).map(PerHost::Count),
            Some(_) => Some(PerHost::Auto),
            None => None,
        };
    }
    Ok(())
}

/// The place of this host, if the user has given the number of hosts as `given`.
fn place(options: &Options, given: Option<Processes>) -> Result<Option<HostPlace>> {
    let hosts = options.hosts();
    let host = options.node_rank;
    if let Some(host) = host.filter(|&host| host >= hosts) {
        let give = match given {
            None if hosts == 1 => "give --nnodes, the number of hosts",
            _ => "hosts are numbered from 0",
        };
        return Err(Error::usage(format!(
            "--node-rank {host} is no host of {hosts}: {give}"
        )));
    }
    if hosts == 1 {
        // Each host would have a job of its own.
        let meant = [
            (host.is_some(), "--node-rank"),
            (options.rdzv_endpoint.is_some(), "--rdzv-endpoint"),
            (options.join_timeout.is_some(), "--join-timeout"),
        ];
        return match meant.into_iter().find(|(is_given, _)| *is_given) {
            Some((_, option)) if given.is_none() => Err(Error::usage(format!(
                "{option} is for a job on several hosts: give --nnodes, the number of hosts, or leave {option} out"
            ))),
            _ => Ok(None),
        };
    }
    if options.num_processes.is_some() {
        return Err(Error::usage(format!(
            "--num-processes is a total elsewhere, and with --nnodes {hosts} it could be meant for all hosts or for \
             each: give --nproc-per-node, the number of ranks on this host"
        )));
    }
    let Some(host) = host else {
        return Err(Error::usage(format!(
            "--nnodes {hosts} needs --node-rank: 0 on one host, 1 to {} on the others",
            hosts - 1
        )));
    };
    let of_master = options.master_addr.as_ref().map(|host| Endpoint {
        host: host.clone(),
        port: options.master_port.unwrap_or(Endpoint::DEFAULT_PORT),
    });
    let Some(endpoint) = options.rdzv_endpoint.clone().or(of_master) else {
        return Err(Error::usage(format!(
            "--nnodes {hosts} needs --rdzv-endpoint HOST[:PORT], where host 0 is reached by the others"
        )));
    };
    if endpoint.port == 0 {
        return Err(Error::usage(format!(
            "--rdzv-endpoint {endpoint}: the hosts have to know the port, and 0 is a free one; choose one, or leave it \
             out for {}",
            Endpoint::DEFAULT_PORT
        )));
    }
    Ok(Some(HostPlace {
        hosts,
        least_hosts: options.nnodes.map_or(hosts, |hosts| hosts.least.get()),
        host,
        endpoint,
        join_timeout: options.join_timeout.unwrap_or(DEFAULT_JOIN_TIMEOUT),
    }))
}

impl PerHost {
    fn count(self, options: &Options) -> Result<NonZeroUsize> {
        let gpus = || {
            let inherited = std::env::var_os(VISIBLE);
            let visible = Visible::of(inherited.as_deref());
            let count = match (&options.gpu_ids, &visible) {
                (Some(GpuIds::Listed(ids)), _) => ids.len(),
                (_, Visible::Listed(ids)) => ids.len(),
                (_, Visible::All) => gpu::of_this_host(&visible).len(),
            };
            NonZeroUsize::new(count.min(Topology::LARGEST))
        };
        match self {
            Self::Count(count) => Ok(count),
            Self::Auto => Ok(gpus().unwrap_or(NonZeroUsize::MIN)),
            Self::Cpu => Ok(settings::cores()),
            Self::Gpu => gpus().ok_or_else(|| {
                Error::usage(
                    "--nproc-per-node gpu: this host has no NVIDIA GPU, or CUDA_VISIBLE_DEVICES hides it; give a number",
                )
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoint(text: &str) -> Option<(String, u16)> {
        let endpoint: Endpoint = text.parse().ok()?;
        Some((endpoint.host, endpoint.port))
    }

    fn several(change: impl FnOnce(&mut Options)) -> Result<(Options, Option<HostPlace>)> {
        let mut options = Options {
            nnodes: NonZeroUsize::new(2).map(Processes::exactly),
            node_rank: Some(1),
            rdzv_endpoint: "h".parse().ok(),
            nproc_per_node: Some(PerHost::Count(NonZeroUsize::MIN)),
            ..Options::default()
        };
        change(&mut options);
        resolve(&options, |_| None)
    }

    /// Resolves options if an engine has set variables, such as `PET_NNODES=2`.
    fn under(options: &Options, variables: &str) -> Result<(Options, Option<HostPlace>)> {
        resolve(options, |name| {
            let mut set = variables
                .split_whitespace()
                .filter_map(|set| set.split_once('='));
            set.find(|(key, _)| *key == name)
                .map(|(_, value)| value.to_owned())
        })
    }

    #[test]
    fn an_engine_tells_what_options_leave_open() {
        let train_job = "PET_NNODES=2 PET_NODE_RANK=1 PET_NPROC_PER_NODE=3 PET_MASTER_ADDR=head \
                         PET_MASTER_PORT=29500";
        let (options, place) = under(&Options::default(), train_job).unwrap();
        let place = place.unwrap();
        assert_eq!((place.hosts, place.host), (2, 1));
        assert_eq!(place.endpoint.to_string(), "head:29500");
        assert_eq!(options.processes().most.get(), 3);

        let given = Options {
            node_rank: Some(0),
            rdzv_endpoint: "other:7".parse().ok(),
            nproc_per_node: Some(PerHost::Count(NonZeroUsize::MIN)),
            ..Options::default()
        };
        let (options, place) = under(&given, train_job).unwrap();
        let place = place.unwrap();
        assert_eq!(
            (place.host, place.endpoint.to_string()),
            (0, "other:7".to_owned())
        );
        assert_eq!(options.processes().most.get(), 1);

        let step = "SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=n[1-2] SLURM_STEP_NUM_TASKS=2 \
                    SLURM_STEP_NUM_NODES=2 SLURM_STEP_TASKS_PER_NODE=1(x2) SLURM_PROCID=1 SLURM_LOCALID=0 SLURM_NODEID=1";
        let (_, place) = under(&Options::default(), step).unwrap();
        let place = place.unwrap();
        assert_eq!(
            (place.hosts, place.host, &*place.endpoint.host),
            (2, 1, "n1")
        );

        let indexed = Options {
            nnodes: NonZeroUsize::new(2).map(Processes::exactly),
            rdzv_endpoint: "h".parse().ok(),
            ..Options::default()
        };
        let (_, place) = under(&indexed, "JOB_COMPLETION_INDEX=1").unwrap();
        assert_eq!(place.unwrap().host, 1);
    }

    #[test]
    fn an_engine_does_not_make_a_job_of_several_hosts_out_of_one_that_is_asked_for_here() {
        let train_job = "PET_NNODES=2 PET_NODE_RANK=1 PET_MASTER_ADDR=head";
        for options in [
            Options {
                num_processes: NonZeroUsize::new(2).map(Processes::exactly),
                ..Options::default()
            },
            Options {
                nnodes: Some(Processes::exactly(NonZeroUsize::MIN)),
                ..Options::default()
            },
        ] {
            assert_eq!(under(&options, train_job).unwrap().1, None);
        }
        let alone = "PET_NNODES=1 PET_NODE_RANK=0 PET_NPROC_PER_NODE=4 JOB_COMPLETION_INDEX=5";
        assert_eq!(under(&Options::default(), alone).unwrap().1, None);
        for (node_rank, says) in [
            (0, "--node-rank is for a job on several"),
            (1, "1 is no host of 1: give --nnodes"),
        ] {
            let options = Options {
                node_rank: Some(node_rank),
                rdzv_endpoint: "h".parse().ok(),
                ..Options::default()
            };
            let error = under(&options, alone).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
        let elastic = under(
            &Options::default(),
            "PET_NNODES=1:4 PET_NODE_RANK=0 PET_RDZV_ENDPOINT=h",
        );
        let place = elastic.unwrap().1.unwrap();
        assert_eq!((place.least_hosts, place.hosts), (1, 4));
    }

    #[test]
    fn endpoints_are_read() {
        for (text, host, port) in [
            ("h", "h", 29400),
            ("h:0", "h", 0),
            ("10.0.0.1:7", "10.0.0.1", 7),
            ("fd00::1", "fd00::1", 29400),
            ("[fd00::1]:7", "fd00::1", 7),
            ("[::1]", "::1", 29400),
        ] {
            assert_eq!(endpoint(text), Some((host.to_owned(), port)), "{text}");
        }
        for text in ["", ":7", "h:p", "h:70000", "[h]:7", "[::1", "a b", "u@h"] {
            assert_eq!(endpoint(text), None, "{text}");
        }
        for text in ["fe80::1", "[fe80::1%eth0]:7", "fe80::1%2", "[fe80::1]"] {
            let error = text.parse::<Endpoint>().unwrap_err();
            assert!(error.contains("is a link-local address"), "{text}: {error}");
        }
        let shown = ["h:7", "[::1]:7"].map(|text| text.parse::<Endpoint>().unwrap().to_string());
        assert_eq!(shown, ["h:7", "[::1]:7"]);
    }

    #[test]
    fn a_host_knows_its_place() {
        let (options, place) = several(|_| {}).unwrap();
        let place = place.unwrap();
        assert_eq!((place.hosts, place.host), (2, 1));
        assert_eq!(place.endpoint.to_string(), "h:29400");
        assert_eq!(options.processes().most.get(), 1);
        // Accelerate's main process is the endpoint.
        let (options, place) = several(|options| {
            options.rdzv_endpoint = None;
            options.master_addr = Some("m".to_owned());
            options.master_port = Some(7);
        })
        .unwrap();
        assert_eq!(place.unwrap().endpoint.to_string(), "m:7");
        assert_eq!((options.master_addr, options.master_port), (None, None));
        let (_, place) = several(|options| {
            options.nnodes = Some(Processes::exactly(NonZeroUsize::MIN));
            options.node_rank = Some(0);
        })
        .unwrap();
        assert_eq!(place, None);
    }

    #[test]
    fn a_number_of_ranks_is_read() {
        let read = |text: &str| text.parse::<PerHost>().ok();
        assert_eq!(read("auto"), Some(PerHost::Auto));
        assert_eq!(read("1"), Some(PerHost::Count(NonZeroUsize::MIN)));
        for text in ["0", "-1", "two", "1:2", "99999"] {
            assert_eq!(read(text), None, "{text}");
        }
    }
}
