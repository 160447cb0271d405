/* amxtrap.h - what a test can ask the emulator of AMX. Weak: the program also links without it. */
#ifndef AMXTRAP_H
#define AMXTRAP_H

/* 1 when tile instructions are carried out in software in this process. */
__attribute__((weak)) int amxtrap_active(void);

/* How often an instruction ("tdpbssd", "tileloadd", ...) was carried out, by all threads. */
__attribute__((weak)) unsigned long amxtrap_count(const char *name);

#endif
