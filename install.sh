#!/bin/sh
# Puts kt on a person's PATH, and takes it away again: with pipx or uv where one is there, which make an environment
# of their own, else as a link to the environment of this source tree. `make install` and `make uninstall` call it.
#
#   sh install.sh install|uninstall VENV

set -eu
what=$1 venv=$2
tree=$(cd "$(dirname "$0")" && pwd)
programs=${XDG_BIN_HOME:-$HOME/.local/bin}
manuals=${XDG_DATA_HOME:-$HOME/.local/share}/man/man1

# The program that installs: pipx, uv or nothing.
installer() {
    for tool in pipx uv; do
        if command -v $tool >/dev/null 2>&1; then echo $tool; return; fi
    done
}

# mine LINK: whether a file is a link that this script made, from whichever source tree.
mine() {
    [ -h "$1" ] || return 1
    case $(readlink "$1") in */bin/kt | */docs/kt.1 | */share/man/man1/kt.1) return 0 ;; *) return 1 ;; esac
}

# link FROM TO: a link at TO, in the place of an older one, but of nothing else.
link() {
    mkdir -p "$(dirname "$2")"
    if [ -e "$2" ] || [ -h "$2" ]; then
        mine "$2" || { echo "error: $2 already exists and is not a link made by kt; move it away" >&2; exit 1; }
    fi
    ln -sfn "$1" "$2"
}

# manual ENVIRONMENT: `man kt` finds the page of an environment, unless the installer saw to that.
manual() {
    if [ -f "$1" ] && { [ ! -e "$manuals/kt.1" ] || mine "$manuals/kt.1"; }; then link "$1" "$manuals/kt.1"; fi
}

put() {
    extra=
    if nvidia-smi -L >/dev/null 2>&1; then extra='[gpu]'; fi
    page=share/man/man1/kt.1
    case $(installer) in
        pipx)
            echo "Installing kt with pipx ..."
            pipx install --force "$tree$extra"
            bin=$(pipx environment --value PIPX_BIN_DIR)
            manual "$(pipx environment --value PIPX_LOCAL_VENVS)/ktcli/$page" ;;
        uv)
            echo "Installing kt with uv ..."
            uv tool install --force --compile-bytecode "$tree$extra"
            bin=$(uv tool dir --bin)
            manual "$(uv tool dir)/ktcli/$page" ;;
        *)
            bin=$programs
            link "$venv/bin/kt" "$bin/kt"
            manual "$tree/docs/kt.1"
            echo "Neither pipx nor uv is installed, so $bin/kt is a link into $venv; keep that folder." ;;
    esac
    echo "Installed $bin/kt. Remove it with: make uninstall. Shell completion: kt completion install"
    case :$PATH: in
        *":$bin:"*) ;;
        *)
            echo "$bin is not on your PATH yet. To use kt in this terminal, type:"
            echo
            echo "    export PATH=\"$bin:\$PATH\""
            echo
            echo "New logins find it by themselves where ~/.profile adds $bin (as on Debian and Ubuntu); elsewhere put that"
            echo "line into ~/.profile." ;;
    esac
    other "$bin/kt"
}

# other PROGRAM: warns of another kt that the shell finds before PROGRAM, or would find without it.
other() {
    rest=$PATH:
    while [ -n "$rest" ]; do
        folder=${rest%%:*} rest=${rest#*:}
        if [ "$folder/kt" = "$1" ]; then return; fi
        if [ -x "$folder/kt" ] && [ ! -d "$folder/kt" ] && [ ! "$folder/kt" -ef "$1" ]; then
            echo "warning: another program named kt comes first on the PATH: $folder/kt (KTransformers installs one, too);" \
                "run this one as $1, or put $(dirname "$1") before $folder in the PATH" >&2
            return
        fi
    done
}

take() {
    gone=
    if command -v pipx >/dev/null 2>&1 && pipx list --short 2>/dev/null | grep -q '^ktcli '; then
        pipx uninstall ktcli
        gone=yes
    fi
    if command -v uv >/dev/null 2>&1 && uv tool list 2>/dev/null | grep -q '^ktcli '; then
        uv tool uninstall ktcli
        gone=yes
    fi
    for each in "$programs/kt" "$manuals/kt.1"; do
        if mine "$each"; then
            rm "$each"
            echo "removed $each"
            gone=yes
        fi
    done
    if [ -z "$gone" ]; then echo "kt is not installed"; else echo "Models, chats and settings stay where they are."; fi
}

case $what in
    install) put ;;
    uninstall) take ;;
    *) echo "usage: sh install.sh install|uninstall VENV" >&2; exit 2 ;;
esac
