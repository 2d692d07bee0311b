# Read-only git: no locks, no pager, and nothing run that the repository's own settings name.
export GIT_OPTIONAL_LOCKS=0 GIT_CONFIG_NOSYSTEM=1
repo() {
    git --no-pager -c safe.directory='*' -c core.fsmonitor=false -c core.hooksPath=/dev/null -c color.ui=false "$@"
}
