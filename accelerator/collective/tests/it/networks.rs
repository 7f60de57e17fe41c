//! Ranks on several hosts, which are network namespaces. The tests are skipped if those are not allowed.

use std::{
    env,
    time::{Duration, SystemTime},
};

use crate::netns::{Network, Rank};
use accelerator_collective::{GroupOptions, Launch, ProcessGroup, ReduceOp};

/// Acts as a rank if the variables of a job are set, and otherwise does nothing.
#[test]
fn a_rank() {
    let Ok(deed) = env::var(DEED) else {
        return;
    };
    // The test harness has begun a line.
    println!();
    let options = GroupOptions::new().with_connect_timeout(Duration::from_secs(60));
    let group = match ProcessGroup::connect(&Launch::from_env().unwrap(), &options) {
        Ok(group) => group,
        Err(error) => {
            println!("refused\t{error}");
            return;
        }
    };
    println!("connected\t{}", group.transport());
    match &*deed {
        "reduce" => {
            for len in LENGTHS {
                let mut values = sample(group.rank(), len);
                group.all_reduce(&mut values, ReduceOp::Sum).unwrap();
                println!("sum\t{:016x}", digest(&values));
            }
            group.close().unwrap();
        }
        "continue" => {
            let mut values = vec![1.0_f32; 300_000];
            group.all_reduce(&mut values, ReduceOp::Mean).unwrap();
            println!("ready");
            let error = loop {
                if let Err(error) = group.all_reduce(&mut values, ReduceOp::Mean) {
                    break error;
                }
            };
            println!("error\t{}\t{:?}\t{error}", now(), error.ranks());
        }
        _ => panic!("{deed} is no deed of this test"),
    }
}

#[test]
fn two_hosts() {
    same_bits(2, 1, "tcp");
}

#[test]
fn three_hosts() {
    same_bits(3, 1, "tcp");
}

/// The ranks of each host share memory, so only one rank's traffic leaves it.
#[test]
fn two_hosts_of_two_ranks() {
    same_bits(2, 2, "hierarchical");
}

/// On Debian a host resolves its own name to 127.0.1.1, and other hosts resolve it to its address in the network.
#[test]
fn hosts_meet_whose_own_names_are_loopback_addresses() {
    let Some(network) = Network::new(2) else {
        return;
    };
    network.name_hosts("127.0.1.1");
    meet(&network, 2, &["node-0"; 4]);
}

/// With `ip_nonlocal_bind`, a socket can bind another host's address.
#[test]
fn an_address_in_front_of_a_host_is_told_from_its_own() {
    let Some(network) = Network::new(2) else {
        return;
    };
    network.set(0, "net/ipv4/ip_nonlocal_bind", "1");
    meet(&network, 1, &["10.77.0.9", "10.77.0.1"]);
}

/// The name of host 0 resolves to IPv6 on that host and to IPv4 elsewhere, and IPv6 sockets accept no IPv4.
#[test]
fn hosts_of_both_families_meet() {
    let Some(network) = Network::new(2) else {
        return;
    };
    network.name_hosts("::1");
    network.set(0, "net/ipv6/bindv6only", "1");
    meet(&network, 1, &["node-0"; 2]);
}

/// Lets ranks that have these addresses of rank 0 compute a sum.
fn meet(network: &Network, ranks_per_host: usize, addresses: &[&str]) {
    let token = network.token();
    let start = |(rank, address): (usize, &&str)| {
        let variables = [
            (DEED, "reduce"),
            ("ACCEL_TOKEN_FILE", token.to_str().unwrap()),
            ("MASTER_ADDR", *address),
        ];
        network.start(rank, ranks_per_host, &variables)
    };
    let ranks: Vec<Rank> = addresses.iter().enumerate().map(start).collect();
    for mut rank in ranks {
        rank.line("connected");
        for _ in LENGTHS {
            rank.line("sum");
        }
        assert!(rank.end().success());
    }
}

/// Without a token, several hosts must state that they want none.
#[test]
fn hosts_without_a_token_meet_only_if_they_say_so() {
    let Some(network) = Network::new(2) else {
        return;
    };
    // The host of the store would keep waiting for the other rank.
    let host = network.start(0, 1, &[(DEED, "reduce")]);
    let mut refused = network.start(1, 1, &[(DEED, "reduce")]);
    assert!(refused.line("refused")[0].contains("ACCEL_INSECURE=1"));
    drop((host, refused));
    let insecure = [(DEED, "reduce"), ("ACCEL_INSECURE", "1")];
    for mut rank in [
        network.start(0, 1, &insecure),
        network.start(1, 1, &insecure),
    ] {
        rank.line("connected");
        rank.line("sum");
        assert!(rank.end().success());
    }
}

/// The cable is unplugged, and each side finds the other silent.
#[test]
fn a_link_that_goes_down_is_named() {
    let Some((network, mut ranks)) = started(2, 1, "continue") else {
        return;
    };
    for rank in &mut ranks {
        rank.line("ready");
    }
    let cut = now();
    network.cut(1);
    for (rank, other) in ranks.iter_mut().zip([1, 0]) {
        let error = rank.line("error");
        assert_eq!(error[1], format!("[{other}]"), "{error:?}");
        assert!(error[2].contains("silent"), "{error:?}");
        // The liveness timeout is a second, and the machine may be busy.
        let waited = error[0].parse::<u64>().unwrap() - cut;
        assert!((900..5000).contains(&waited), "{waited} ms: {error:?}");
    }
}

#[test]
fn a_rank_that_dies_on_another_host_is_named() {
    for (hosts, ranks_per_host) in [(3, 1), (2, 2)] {
        a_rank_dies(hosts, ranks_per_host);
    }
}

fn a_rank_dies(hosts: usize, ranks_per_host: usize) {
    let Some((_network, mut ranks)) = started(hosts, ranks_per_host, "continue") else {
        return;
    };
    for rank in &mut ranks {
        rank.line("ready");
    }
    let victim = ranks.remove(1);
    let (pid, dead) = (victim.pid(), now());
    drop(victim);
    for rank in &mut ranks {
        let error = rank.line("error");
        assert_eq!(error[1], "[1]", "{error:?}");
        assert!(
            error[2].contains(&format!("rank 1 (process {pid} on ")),
            "{error:?}"
        );
        let waited = error[0].parse::<u64>().unwrap() - dead;
        assert!(waited < 3000, "{waited} ms: {error:?}");
    }
}

/// Asserts that every rank holds the sum that one thread computes, within each host in rank order and then host by
/// host, and that a host sends as much as if it held one rank.
fn same_bits(hosts: usize, ranks_per_host: usize, transport: &str) {
    let Some((network, mut ranks)) = started(hosts, ranks_per_host, "reduce") else {
        return;
    };
    for rank in &mut ranks {
        assert_eq!(rank.line("connected"), [transport]);
    }
    for len in LENGTHS {
        let by_host = (0..hosts).map(|host| {
            let ranks = (0..ranks_per_host).map(|local| sample(host * ranks_per_host + local, len));
            ranks.reduce(sum).unwrap()
        });
        let expected = format!("{:016x}", digest(&by_host.reduce(sum).unwrap()));
        for rank in &mut ranks {
            assert_eq!(rank.line("sum"), [&*expected], "{len} values");
        }
    }
    for rank in ranks {
        assert!(rank.end().success());
    }
    let total: usize = LENGTHS.iter().map(|len| 4 * len).sum();
    let least = (2 * total * (hosts - 1) / hosts) as u64;
    for host in 0..hosts {
        let sent = network.sent(host);
        // The rest is headers, and traffic for the rendezvous, declarations and acknowledgements.
        let most = least + least / 8 + 300_000;
        assert!(
            (least..most).contains(&sent),
            "host {host} sent {sent} bytes, not {least}"
        );
    }
}

fn started(hosts: usize, ranks_per_host: usize, deed: &str) -> Option<(Network, Vec<Rank>)> {
    let network = Network::new(hosts)?;
    let token = network.token();
    let variables = [(DEED, deed), ("ACCEL_TOKEN_FILE", token.to_str().unwrap())];
    let ranks = (0..hosts * ranks_per_host)
        .map(|rank| network.start(rank, ranks_per_host, &variables))
        .collect();
    Some((network, ranks))
}

/// Returns values of many magnitudes, whose sum depends on the order.
fn sample(rank: usize, len: usize) -> Vec<f32> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(rank as u64 + 1);
    let values = (0..len).map(|_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let magnitude = [1e-3, 1.0, 1e3, 1e6][(state & 3) as usize];
        (state >> 40) as f32 / 16_777_216.0 * magnitude - magnitude / 2.0
    });
    values.collect()
}

fn sum(left: Vec<f32>, right: Vec<f32>) -> Vec<f32> {
    left.iter().zip(&right).map(|(x, y)| x + y).collect()
}

fn digest(values: &[f32]) -> u64 {
    values.iter().fold(0xcbf2_9ce4_8422_2325, |hash, value| {
        (hash ^ u64::from(value.to_bits())).wrapping_mul(0x0100_0000_01b3)
    })
}

/// Returns milliseconds on a clock that all processes of the machine share.
fn now() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.unwrap().as_millis() as u64
}

/// Short operations, with parts of one chunk, and with parts of several.
const LENGTHS: [usize; 4] = [10, 4000, 100_000, 1_000_003];

const DEED: &str = "NETWORK_TEST_DEED";
