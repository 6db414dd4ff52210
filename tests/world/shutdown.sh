#!/bin/sh
# shutdown, poweroff, halt, reboot and systemctl of an emulated machine: leaves word of what was asked to the world.
asked=
case ${0##*/} in
shutdown)
  asked=1
  for word in "$@"; do
    case $word in
    -c) asked=never && break ;;
    -*) ;;
    now) asked=0 && break ;;
    +*) asked=${word#+} && break ;;
    *) echo "an emulated machine knows no time like $word" >&2 && exit 1 ;;
    esac
  done
  ;;
systemctl)
  case $* in
  *poweroff* | *halt*) asked=0 ;;
  *) exit 0 ;;
  esac
  ;;
*) asked=0 ;;
esac
[ "$(id -u)" = 0 ] || { echo "only root may do that" >&2 && exit 1; }
echo "$asked" >/run/world/.shutdown && mv /run/world/.shutdown /run/world/shutdown
