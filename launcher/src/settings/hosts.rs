//! Lists of hosts: those of `--hosts`, and the files of Open MPI, MPICH and DeepSpeed.
//!
//! ```text
//! list := item { "," item }                  item := host [ ":" count ]           host := [ user "@" ] ( name | "[" IPv6 "]" )
//! file := { line }                           line := list { key "=" value }       key  := slots | max_slots | port | user
//! ```
//!
//! A name may stand for several, as in Slurm's lists: `node[01-03]:2`. Comments begin with `#` or `//`, or stand between
//! `/*` and `*/`. A host that is listed twice without a count runs two ranks, as with Open MPI.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::num::NonZeroUsize;
use std::path::Path;
use std::str::FromStr;

use accelerator_collective::Topology;
use accelerator_collective::internal::expand_hosts;

use crate::error::{Error, Result};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ListedHost {
    /// The user to log in as.
    pub(crate) user: Option<String>,
    /// Its name or address, an IPv6 address without brackets.
    pub(crate) name: String,
    /// The port of its SSH server.
    pub(crate) port: Option<u16>,
    /// The number of ranks that it runs, if the list gives one.
    pub(crate) ranks: Option<NonZeroUsize>,
}

/// The hosts of a list, in its order. No host is in it twice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HostList {
    hosts: Vec<ListedHost>,
}

impl HostList {
    /// Reads a host file.
    ///
    /// # Errors
    /// When the file cannot be read, or a line of it: the error has its number.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(|error| {
            let text = format!("the host file {} cannot be read", path.display());
            Error::usage(text).with_source(error)
        })?;
        Self::of_file(&text).map_err(|(line, text)| {
            let at = line.map(|line| format!(":{line}")).unwrap_or_default();
            Error::usage(format!("{}{at}: {text}", path.display()))
        })
    }

    pub(crate) fn hosts(&self) -> &[ListedHost] {
        &self.hosts
    }

    /// The hosts of a file's text.
    fn of_file(text: &str) -> std::result::Result<Self, (Option<usize>, String)> {
        let text = without_comments(text);
        let mut hosts = Vec::new();
        for (at, line) in text.lines().enumerate() {
            let words = words(line);
            if let [first, rest @ ..] = words.as_slice() {
                let added = hosts_of_line(first, rest).and_then(|more| add_all(&mut hosts, more));
                added.map_err(|text| (Some(at + 1), text))?;
            }
        }
        Self::of(hosts).map_err(|text| (None, text))
    }

    fn of(hosts: Vec<(ListedHost, usize)>) -> std::result::Result<Self, String> {
        if hosts.is_empty() {
            return Err("expected at least one host".to_owned());
        }
        let counted = hosts.into_iter().map(|(host, times)| ListedHost {
            // One that stands there once leaves the number to `--nproc-per-node`.
            ranks: host
                .ranks
                .or(NonZeroUsize::new(times).filter(|times| times.get() > 1)),
            ..host
        });
        Ok(Self {
            hosts: counted.collect(),
        })
    }
}

impl FromStr for HostList {
    type Err = String;

    /// The value of `--hosts`.
    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let mut hosts = Vec::new();
        add_all(&mut hosts, hosts_of(text)?)?;
        Self::of(hosts)
    }
}

impl fmt::Display for ListedHost {
    /// Writes the host as it is listed, without the count.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.user {
            Some(user) => write!(formatter, "{user}@{}", self.name),
            None => formatter.write_str(&self.name),
        }
    }
}

const EXPECTED: &str = "expected HOST or HOST:RANKS, such as node1:4, ann@node1 or [fd00::1]:4";

/// Adds `more` to hosts and their counts.
fn add_all(
    hosts: &mut Vec<(ListedHost, usize)>,
    more: Vec<ListedHost>,
) -> std::result::Result<(), String> {
    if hosts.len() + more.len() > Topology::LARGEST {
        return Err(format!(
            "expected at most {} hosts, as many as a job can have ranks",
            Topology::LARGEST
        ));
    }
    more.into_iter().try_for_each(|host| add(hosts, host))
}

/// Adds `host` to hosts and their counts.
fn add(hosts: &mut Vec<(ListedHost, usize)>, host: ListedHost) -> std::result::Result<(), String> {
    let Some((known, times)) = hosts.iter_mut().find(|(known, _)| known.name == host.name) else {
        hosts.push((host, 1));
        return Ok(());
    };
    let name = &host.name;
    if known.ranks.is_some() || host.ranks.is_some() {
        return Err(format!(
            "the host {name} is listed twice; list it once, with the number of its ranks"
        ));
    }
    if *known != host {
        return Err(format!(
            "the host {name} is listed twice, with different users or ports"
        ));
    }
    *times += 1;
    Ok(())
}

/// The hosts of a list such as `ann@node1:4,node[2-3]:2`.
fn hosts_of(list: &str) -> std::result::Result<Vec<ListedHost>, String> {
    let mut is_inside = false;
    // Commas within brackets part no items.
    let items = list.split(|letter| {
        is_inside = letter == '[' || (is_inside && letter != ']');
        letter == ',' && !is_inside
    });
    let mut hosts = Vec::new();
    for item in items.map(str::trim) {
        let (_, name) = item.split_once('@').unwrap_or(("", item));
        let is_several = name.contains('[') && !name.starts_with('[');
        if !is_several || item.contains(char::is_whitespace) {
            hosts.push(item_of(item)?);
            continue;
        }
        for item in expand_hosts(item).map_err(|error| error.to_string())? {
            hosts.push(item_of(&item)?);
        }
    }
    Ok(hosts)
}

/// The host of an item such as `ann@node1:4`.
fn item_of(item: &str) -> std::result::Result<ListedHost, String> {
    let wrong = || format!("{EXPECTED}; found {item:?}");
    let (user, rest) = match item.split_once('@') {
        Some((user, rest)) => (Some(user), rest),
        None => (None, item),
    };
    let (name, ranks) = match rest.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, rest)) => {
            address.parse::<Ipv6Addr>().map_err(|_| wrong())?;
            let ranks = match rest {
                "" => None,
                _ => Some(rest.strip_prefix(':').ok_or_else(wrong)?),
            };
            (address, ranks)
        }
        None if rest.parse::<Ipv6Addr>().is_ok() => {
            return Err(format!(
                "expected an IPv6 address in brackets, such as [{rest}]:4; found {item:?}"
            ));
        }
        None => match rest.split_once(':') {
            Some((name, ranks)) => (name, Some(ranks)),
            None => (rest, None),
        },
    };
    let is_name = |text: &str, more: &str| {
        // An option of ssh must not be taken for a host, nor anything that a shell reads.
        let is_in = |letter: char| letter.is_ascii_alphanumeric() || more.contains(letter);
        !text.is_empty() && !text.starts_with('-') && text.chars().all(is_in)
    };
    if !is_name(name, "-_.:") || user.is_some_and(|user| !is_name(user, "-_.")) {
        return Err(wrong());
    }
    Ok(ListedHost {
        user: user.map(str::to_owned),
        name: name.to_owned(),
        port: None,
        ranks: ranks.map(count).transpose()?,
    })
}

/// The hosts of a line of a file, from its first word and the others.
fn hosts_of_line(first: &str, rest: &[String]) -> std::result::Result<Vec<ListedHost>, String> {
    let hosts = hosts_of(first)?.into_iter();
    hosts.map(|host| with_words(host, rest)).collect()
}

/// Reads a host and the words after it.
fn with_words(mut host: ListedHost, rest: &[String]) -> std::result::Result<ListedHost, String> {
    let mut most = None;
    for word in rest {
        let Some((key, value)) = word.split_once('=') else {
            return Err(format!(
                "expected KEY=VALUE after the host {}, such as slots=4; found {word:?}",
                host.name
            ));
        };
        let is_second = match key {
            "slots" => host.ranks.replace(count(value)?).is_some(),
            "max_slots" | "max-slots" => most.replace(count(value)?).is_some(),
            "port" => {
                let port = value.parse().ok().filter(|&port| port > 0);
                let port = port.ok_or_else(|| format!("expected a port; found {word:?}"))?;
                host.port.replace(port).is_some()
            }
            "user" => {
                let of_user = item_of(&format!("{value}@host"))?;
                host.user
                    .replace(of_user.user.unwrap_or_default())
                    .is_some()
            }
            _ => {
                return Err(format!(
                    "expected slots=N, max_slots=N, port=N or user=NAME; found {word:?}"
                ));
            }
        };
        if is_second {
            return Err(format!(
                "expected {key} once; found {word:?} after another one"
            ));
        }
    }
    match (host.ranks, most) {
        (Some(ranks), Some(most)) if ranks > most => Err(format!(
            "expected at most max_slots={most} ranks; found slots={ranks}"
        )),
        _ => Ok(host),
    }
}

fn count(text: &str) -> std::result::Result<NonZeroUsize, String> {
    let count = text.parse().ok().and_then(NonZeroUsize::new);
    count
        .filter(|count| count.get() <= Topology::LARGEST)
        .ok_or_else(|| {
            format!(
                "expected a number of ranks from 1 to {}; found {text:?}",
                Topology::LARGEST
            )
        })
}

/// The words of a line; blanks around `=` part none.
fn words(line: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    let mut is_open = false;
    for word in line.replace('=', " = ").split_whitespace() {
        match words.last_mut() {
            Some(last) if is_open || word == "=" => last.push_str(word),
            _ => words.push(word.to_owned()),
        }
        is_open = word == "=";
    }
    words
}

/// The text with its lines and without comments.
fn without_comments(text: &str) -> String {
    let mut kept = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(['#', '/']) {
        let (before, comment) = rest.split_at(at);
        kept.push_str(before);
        if let Some(inner) = comment.strip_prefix("/*") {
            let end = inner.find("*/").unwrap_or(inner.len());
            kept.extend(inner[..end].matches('\n'));
            rest = inner[end..].strip_prefix("*/").unwrap_or("");
        } else if comment.starts_with('#') || comment.starts_with("//") {
            rest = &comment[comment.find('\n').unwrap_or(comment.len())..];
        } else {
            kept.push('/');
            rest = &comment[1..];
        }
    }
    kept + rest
}

/// A host and a port. The port is that of torchrun where none is given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Endpoint {
    /// An address or a name.
    pub(crate) host: String,
    pub(crate) port: u16,
}

impl Endpoint {
    /// The port of torchrun.
    pub(crate) const DEFAULT_PORT: u16 = 29400;

    /// Returns the address, unless it is a name.
    pub(crate) fn address(&self) -> Option<IpAddr> {
        self.host.parse().ok()
    }
}

impl FromStr for Endpoint {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let v6 = |host: &str| host.split('%').next().unwrap_or(host).parse::<Ipv6Addr>();
        let is_v6 = |host: &str| v6(host).is_ok();
        let (host, port) = match text.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            Some((host, port)) if is_v6(host) => (host, port.strip_prefix(':').or(Some(port))),
            Some(_) => ("", None),
            None if is_v6(text) => (text, None),
            None => match text.split_once(':') {
                Some((host, port)) => (host, Some(port)),
                None => (text, None),
            },
        };
        if v6(host).is_ok_and(|address| address.is_unicast_link_local()) {
            return Err(format!(
                "{host} is a link-local address, which holds on one link only, and which ranks cannot tell one another: \
                 give a name of host 0, or an address in the network, such as [fd00::1]"
            ));
        }
        let port = match port.filter(|port| !port.is_empty()) {
            None => Ok(Self::DEFAULT_PORT),
            Some(port) => port.parse(),
        };
        match port {
            Ok(port) if !host.is_empty() && !host.contains([' ', '/', '@']) => Ok(Self {
                host: host.to_owned(),
                port,
            }),
            _ => Err(
                "expected HOST or HOST:PORT, such as node-0:29400 or [fd00::1]:29400".to_owned(),
            ),
        }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(formatter, "[{}]:{}", self.host, self.port),
            false => write!(formatter, "{}:{}", self.host, self.port),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Hosts with their numbers of ranks, 0 where none is given.
    fn shown(list: HostList) -> String {
        let ranks = |host: &ListedHost| host.ranks.map_or(0, NonZeroUsize::get);
        let shown = list
            .hosts
            .iter()
            .map(|host| format!("{host}*{}", ranks(host)));
        shown.collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn lists_are_read() {
        for (text, expected) in [
            ("a:2,[::1]:2", "a*2 ::1*2"),
            ("a:2, b:1", "a*2 b*1"),
            ("a", "a*0"),
            ("a,a,b", "a*2 b*0"),
            ("ann@node-1.x:3,10.0.0.1", "ann@node-1.x*3 10.0.0.1*0"),
            ("[fd00::1]", "fd00::1*0"),
            ("b@[fd00::1]:7", "b@fd00::1*7"),
            ("node[01-03]:2", "node01*2 node02*2 node03*2"),
            ("ann@n[1,3]-ib, b:4", "ann@n1-ib*0 ann@n3-ib*0 b*4"),
            (
                "r[1-2]n[08-09],[::1]:3",
                "r1n08*0 r1n09*0 r2n08*0 r2n09*0 ::1*3",
            ),
            ("n[1-2],n1", "n1*2 n2*0"),
        ] {
            assert_eq!(text.parse().map(shown).as_deref(), Ok(expected), "{text}");
        }
        for (text, says) in [
            ("", "expected HOST"),
            ("a,,b", "expected HOST"),
            (":2", "expected HOST"),
            ("-oProxyCommand=x", "expected HOST"),
            ("-x@a", "expected HOST"),
            ("@a", "expected HOST"),
            ("a b", "expected HOST"),
            ("a;reboot", "expected HOST"),
            ("a:0", "from 1 to"),
            ("a:two", "found \"two\""),
            ("a:", "found \"\""),
            ("a:2:3", "found \"2:3\""),
            ("::1", "in brackets"),
            ("[::1]2", "expected HOST"),
            ("[a]:2", "expected HOST"),
            ("a:2,a:2", "listed twice"),
            ("a,a:2", "listed twice"),
            ("a,b@a", "different users"),
            (
                "n[3-1]:2",
                "\"n[3-1]:2\": the range \"3-1\" ends before it begins",
            ),
            ("n[1-2", "has no `]`"),
            ("a,n[1-2]]", "has no `[`"),
            ("n[1x3]", "\"1x3\" is no number"),
            ("n[1-2]:two", "found \"two\""),
            ("n[1-2];x", "expected HOST"),
            ("n [1-2]", "expected HOST"),
            ("u[1-2]@n", "expected HOST"),
            ("n[1-2]:2,n2:1", "the host n2 is listed twice"),
            ("n[1-9999]", "at most 8192 hosts"),
        ] {
            let error = text.parse::<HostList>().unwrap_err();
            assert!(error.contains(says), "{text}: {error}");
        }
    }

    #[test]
    fn files_of_other_launchers_are_read() {
        for (text, expected) in [
            ("a slots=2\nb slots=4 # x", "a*2 b*4"),
            ("a\na\nb", "a*2 b*0"),
            ("a:2\nb", "a*2 b*0"),
            ("# all\n\n a   slots = 2 \r\n// b\nc\tslots=1", "a*2 c*1"),
            ("a slots=2 max_slots=4 port=2222", "a*2"),
            ("a /* b\nc */\nd", "a*0 d*0"),
            ("ann@a slots=1\n[::1] slots=2", "ann@a*1 ::1*2"),
            ("a user=ann", "ann@a*0"),
            ("n[1-2] slots=4 # x\nb", "n1*4 n2*4 b*0"),
            (
                "n[1-2]:3 user=ann\nm[1,3],b",
                "ann@n1*3 ann@n2*3 m1*0 m3*0 b*0",
            ),
        ] {
            let list = HostList::of_file(text).map(shown);
            assert_eq!(list.as_deref(), Ok(expected), "{text:?}");
        }
        let list = HostList::of_file("a port=2222").unwrap();
        assert_eq!(list.hosts()[0].port, Some(2222));
    }

    #[test]
    fn what_is_wrong_in_a_file_has_a_line() {
        for (text, line, says) in [
            ("a slots=2\na slots=2", Some(2), "listed twice"),
            ("a slots=2\n\na", Some(3), "listed twice"),
            ("/* x\n*/ a slots=0", Some(2), "from 1 to"),
            ("a 2", Some(1), "expected KEY=VALUE"),
            ("a slots", Some(1), "expected KEY=VALUE"),
            ("a slots=", Some(1), "from 1 to"),
            ("a slots=2 slots=2", Some(1), "expected slots once"),
            ("a:2 slots=2", Some(1), "expected slots once"),
            ("a slots=4 max_slots=2", Some(1), "max_slots=2"),
            ("a cpus=4", Some(1), "expected slots=N"),
            ("a port=0", Some(1), "expected a port"),
            ("a user=-x", Some(1), "expected HOST"),
            ("^a", Some(1), "expected HOST"),
            ("a\nn[1-2 slots=4", Some(2), "has no `]`"),
            ("a\n\nn[2-1]:4", Some(3), "\"2-1\" ends before it begins"),
            ("n[1-2] slots=2\nn2", Some(2), "the host n2 is listed twice"),
            ("# nothing", None, "at least one host"),
        ] {
            let (found, error) = HostList::of_file(text).unwrap_err();
            assert!(
                found == line && error.contains(says),
                "{text:?}: {found:?} {error}"
            );
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hosts");
        std::fs::write(&path, "a\nb c").unwrap();
        let error = HostList::read(&path).unwrap_err().to_string();
        assert!(error.contains("hosts:2: expected KEY=VALUE"), "{error}");
        let missing = HostList::read(&folder.path().join("none")).unwrap_err();
        assert!(missing.to_string().contains("cannot be read"));
    }
}
