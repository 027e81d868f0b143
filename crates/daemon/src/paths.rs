//! The folders and files of the daemon, for root and for other users.
//!
//! Elsewhere: making the folders ([`crate::state`], [`crate::socket`]).

use std::path::{Path, PathBuf};

/// The name of the control socket in the run folder.
const SOCKET: &str = "control.sock";

/// The folders and files of one daemon.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Paths {
    /// The configuration.
    pub config: PathBuf,
    /// Whether the configuration may be missing: true if it is the default path and not an argument.
    pub config_may_be_missing: bool,
    /// Folder of state that must survive a restart: the registered transports and the recovery points.
    pub state_dir: PathBuf,
    /// Folder of state that need not: mounts and sockets.
    pub run_dir: PathBuf,
    /// The control socket.
    pub socket: PathBuf,
    /// Folder of the links to block devices.
    pub dev_dir: PathBuf,
    /// Folder of the rules of udev that seal disks; none if the daemon makes none.
    pub rules_dir: Option<PathBuf>,
}

/// Paths from the command line; an absent one is the default for the user.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PathChoices {
    /// See [`Paths::config`].
    pub config: Option<PathBuf>,
    /// See [`Paths::state_dir`].
    pub state_dir: Option<PathBuf>,
    /// See [`Paths::run_dir`].
    pub run_dir: Option<PathBuf>,
    /// See [`Paths::socket`].
    pub socket: Option<PathBuf>,
    /// See [`Paths::dev_dir`].
    pub dev_dir: Option<PathBuf>,
    /// See [`Paths::rules_dir`].
    pub rules_dir: Option<PathBuf>,
}

impl Paths {
    /// The absolute paths of a daemon that this user starts. They are absolute because devices outlive the daemon and
    /// the next daemon may be started in another folder.
    #[must_use]
    pub fn choose(choices: PathChoices) -> Self {
        Self::choose_for(choices, crate::system::is_root(), |name| std::env::var_os(name).map(PathBuf::from))
    }

    fn choose_for(choices: PathChoices, root: bool, variable: impl Fn(&str) -> Option<PathBuf>) -> Self {
        let absolute = |name: &str| variable(name).filter(|path| path.is_absolute());
        let home = || absolute("HOME").unwrap_or_else(|| PathBuf::from("/"));
        let whole = |path: PathBuf| std::path::absolute(&path).unwrap_or(path);
        let run_dir =
            choices.run_dir.map(whole).unwrap_or_else(|| default_run_dir(root, absolute("XDG_RUNTIME_DIR")));
        // A daemon whose devices are not in /dev is no part of the system: a test, or a second daemon that says so.
        let is_of_the_system = root && choices.dev_dir.is_none();
        let system_rules = is_of_the_system.then(|| PathBuf::from("/etc/udev/rules.d"));
        Self {
            rules_dir: choices.rules_dir.map(whole).or(system_rules),
            config_may_be_missing: choices.config.is_none(),
            config: choices.config.map(whole).unwrap_or_else(|| {
                if root {
                    PathBuf::from("/etc/cbd/cbd.toml")
                } else {
                    absolute("XDG_CONFIG_HOME").unwrap_or_else(|| home().join(".config")).join("cbd/cbd.toml")
                }
            }),
            state_dir: choices.state_dir.map(whole).unwrap_or_else(|| {
                if root {
                    PathBuf::from("/var/lib/cbd")
                } else {
                    absolute("XDG_STATE_HOME").unwrap_or_else(|| home().join(".local/state")).join("cbd")
                }
            }),
            socket: choices.socket.map(whole).unwrap_or_else(|| run_dir.join(SOCKET)),
            run_dir,
            dev_dir: choices.dev_dir.map(whole).unwrap_or_else(|| PathBuf::from("/dev")),
        }
    }
}

/// The control socket of the daemon that this user would start, if it is there; otherwise that of the system's daemon, if the user
/// may use it, as the members of a group may.
#[must_use]
pub fn default_socket() -> PathBuf {
    socket_of(Paths::choose(PathChoices::default()).socket, &default_run_dir(true, None).join(SOCKET))
}

fn socket_of(own: PathBuf, system: &Path) -> PathBuf {
    let is_permitted = || rustix::fs::access(system, rustix::fs::Access::WRITE_OK).is_ok();
    if !own.exists() && is_permitted() { system.to_owned() } else { own }
}

fn default_run_dir(root: bool, runtime_dir: Option<PathBuf>) -> PathBuf {
    match runtime_dir {
        _ if root => PathBuf::from("/run/cbd"),
        Some(dir) => dir.join("cbd"),
        None => PathBuf::from(format!("/tmp/cbd-{}", crate::system::user_id())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_uses_the_folders_of_the_system() {
        let paths = Paths::choose_for(PathChoices::default(), true, |_| Some(PathBuf::from("/elsewhere")));
        assert_eq!(paths.state_dir, PathBuf::from("/var/lib/cbd"));
        assert_eq!(paths.socket, PathBuf::from("/run/cbd/control.sock"));
        assert_eq!(paths.rules_dir, Some(PathBuf::from("/etc/udev/rules.d")));
        let elsewhere = PathChoices { dev_dir: Some(PathBuf::from("/x")), ..PathChoices::default() };
        assert_eq!(Paths::choose_for(elsewhere, true, |_| None).rules_dir, None);
    }

    #[test]
    fn another_user_uses_the_folders_of_the_user() {
        let paths = Paths::choose_for(PathChoices::default(), false, |name| match name {
            "XDG_RUNTIME_DIR" => Some(PathBuf::from("/run/user/7")),
            "HOME" => Some(PathBuf::from("/home/ada")),
            _ => None,
        });
        assert_eq!(paths.state_dir, PathBuf::from("/home/ada/.local/state/cbd"));
        assert_eq!(paths.socket, PathBuf::from("/run/user/7/cbd/control.sock"));
        assert_eq!(paths.rules_dir, None);
    }

    #[test]
    fn the_socket_of_the_system_is_used_where_there_is_none_of_the_user() {
        let folder = tempfile::tempdir().unwrap();
        let (own, system) = (folder.path().join("own"), folder.path().join("system"));
        assert_eq!(socket_of(own.clone(), &system), own);
        std::fs::write(&system, "").unwrap();
        assert_eq!(socket_of(own.clone(), &system), system);
        std::fs::write(&own, "").unwrap();
        assert_eq!(socket_of(own.clone(), &system), own);
    }

    #[test]
    fn a_configuration_that_was_named_has_to_be_there() {
        assert!(Paths::choose(PathChoices::default()).config_may_be_missing);
        let choices = PathChoices { config: Some(PathBuf::from("/x")), ..PathChoices::default() };
        assert!(!Paths::choose(choices).config_may_be_missing);
    }

    #[test]
    fn relative_paths_are_those_of_the_folder_in_which_the_daemon_is_started() {
        let name = |name: &str| Some(PathBuf::from(name));
        let choices = PathChoices {
            config: name("config"),
            state_dir: name("state"),
            run_dir: name("./run"),
            socket: name("socket"),
            dev_dir: name("dev"),
            rules_dir: name("rules"),
        };
        let paths = Paths::choose(choices);
        let here = std::env::current_dir().unwrap();
        for (path, name) in [
            (paths.config, "config"),
            (paths.state_dir, "state"),
            (paths.run_dir, "run"),
            (paths.socket, "socket"),
            (paths.dev_dir, "dev"),
            (paths.rules_dir.unwrap(), "rules"),
        ] {
            assert_eq!(path, here.join(name));
        }
    }

    #[test]
    fn the_socket_moves_with_the_run_folder() {
        let choices = PathChoices { run_dir: Some(PathBuf::from("/x")), ..PathChoices::default() };
        assert_eq!(Paths::choose(choices).socket, PathBuf::from("/x/control.sock"));
    }
}
